"""Attention for JAX that can be differentiated twice at flash-attention speed and memory."""

from jttt.attention import dot_product_attention

__all__ = ["dot_product_attention"]
__version__ = "0.1.0"
