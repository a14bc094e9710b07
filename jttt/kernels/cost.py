"""What a launch costs, for profilers: XLA attributes it to the kernel, which it cannot look into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jttt.kernels.config import Blocks
from jttt.spec import Band

# {kernel: the products that it makes of every tile}. A product runs over the width of the first array
# and is made only if all that are named are there. `scores` stands for a direction that moves them.
_TANGENTS = ("query t_key", "key t_query")
PRODUCTS: dict[str, tuple[str, ...]] = {
    "forward_kernel": ("query key", "value output"),
    "d_query_kernel": ("query key", "value d_output", "key d_query"),
    "d_key_value_kernel": ("query key", "value d_output d_key", "query d_key", "value d_value"),
    "d_bias_kernel": ("query key", "value d_output"),
    "tangent_kernel": ("query key", *_TANGENTS, "value scores", "value t_value"),
    "g_query_kernel": ("query key", *_TANGENTS, "value d_output t_lse", "value t_value", "key g_query",
                       "key t_key g_query"),
    "g_key_value_kernel": ("query key", *_TANGENTS, "value d_output t_lse g_key", "value t_value g_key",
                           "query g_key", "query t_query g_key", "value g_value"),
    "g_bias_kernel": ("query key", *_TANGENTS, "value d_output t_lse", "value t_value"),
}


def estimate(kernel: str, arrays: dict[str, Any], band: Band, blocks: Blocks, batch: int) -> dict[str, int]:
    """Operations in products, and bytes of the arrays, each counted once.

    Tiles that `band` hides are not counted; what is hidden at run time is, since it is not known here.
    `arrays` holds operands and outputs by name; those of None do not count.
    """
    present = {name: x for name, x in arrays.items() if x is not None}
    names = {*present, *(("scores",) if present.keys() & {"t_query", "t_key", "t_bias"} else ())}
    made = [product.split() for product in PRODUCTS[kernel] if names.issuperset(product.split())]
    width = sum(present[first].shape[-1] for first, *_ in made)
    (T, N), S = present["query"].shape[-3:-1], present["key"].shape[-3]
    return dict(flops=2 * width * batch * N * visible_area(band, blocks, T, S),
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in present.values()))


def visible_area(band: Band, blocks: Blocks, T: int, S: int) -> int:
    """Entries of the tiles that a static rule on positions leaves, within T and S."""
    first = np.arange(0, T, blocks.queries)
    last = np.minimum(first + blocks.queries, T) - 1
    start = np.zeros_like(first) if band.left is None else np.clip(first - band.left, 0, S)
    end = np.full_like(first, S) if band.right is None else np.clip(last + band.right + 1, 0, S)
    start = start // blocks.keys * blocks.keys
    end = np.minimum(-(-end // blocks.keys) * blocks.keys, S)
    return int(np.sum((last + 1 - first) * np.maximum(end - start, 0)))
