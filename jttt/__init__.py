"""Attention for JAX that can be differentiated twice at flash-attention speed and memory."""

from jttt.attention import dot_product_attention
from jttt.chunk import KeyValueCache, chunk_attention, empty_cache, merge
from jttt.forward_mode import dot_product_attention_jvp
from jttt.inner_loop import InnerState, inner_loop, inner_step
from jttt.partition import PartitioningWarning
from jttt.ring import from_zigzag, ring_attention, to_zigzag

__all__ = [
    "InnerState",
    "KeyValueCache",
    "PartitioningWarning",
    "chunk_attention",
    "dot_product_attention",
    "dot_product_attention_jvp",
    "empty_cache",
    "from_zigzag",
    "inner_loop",
    "inner_step",
    "merge",
    "ring_attention",
    "to_zigzag",
]
__version__ = "0.1.0"
