"""Attention for JAX that can be differentiated twice at flash-attention speed and memory."""

from jttt.attention import dot_product_attention
from jttt.forward_mode import dot_product_attention_jvp

__all__ = ["dot_product_attention", "dot_product_attention_jvp"]
__version__ = "0.1.0"
