"""Attention for JAX that can be differentiated twice at flash-attention speed and memory."""

from jttt.attention import dot_product_attention
from jttt.forward_mode import dot_product_attention_jvp
from jttt.partition import PartitioningWarning
from jttt.ring import from_zigzag, ring_attention, to_zigzag

__all__ = ["PartitioningWarning", "dot_product_attention", "dot_product_attention_jvp", "from_zigzag", "ring_attention",
           "to_zigzag"]
__version__ = "0.1.0"
