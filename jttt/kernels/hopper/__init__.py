"""The kernels once more, for Hopper's own instructions, in Gluon: `forward.py`, `backward.py`, `double_backward.py`.

Same parameters, same mathematics of a tile (`jttt/kernels/tiles.py`), another way to move it: the copy
engine brings tiles to shared memory, and products run while the warps work on something else
(`stream.py`; `per_row.py` for the numbers that go with a tile's rows). Half precision and widths up to
128; everything else takes the kernels in plain Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax_triton
from triton.experimental.gluon import language as gl

from jttt.kernels import tiles
from jttt.kernels.hopper import backward, double_backward, forward
from jttt.spec import kind

# {a kernel in plain Triton: (what runs in its place, the arrays that reach it as tensor descriptors)}
KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "forward_kernel": (forward.forward_hopper, ("query", "key", "value")),
    "d_query_kernel": (backward.d_query_hopper, ("query", "key", "value", "d_output")),
    "d_key_value_kernel": (backward.d_key_value_hopper, ("query", "key", "value", "d_output")),
    "tangent_kernel": (double_backward.tangent_hopper, ("query", "key", "value", "t_query", "t_key", "t_value")),
    "g_query_kernel": (double_backward.g_query_hopper,
                       ("query", "key", "value", "d_output", "t_query", "t_key", "t_value")),
    "g_key_value_kernel": (double_backward.g_key_value_hopper,
                           ("query", "key", "value", "d_output", "t_query", "t_key", "t_value")),
}


def takes(capability: int, query: Any, value: Any) -> bool:
    """Whether these kernels run arrays of such a width and dtype. The copy engine wants rows of whole 16 bytes."""
    widths = (query.shape[-1], value.shape[-1])
    return capability == 90 and query.dtype.itemsize == 2 and max(widths) <= 128 and not any(w % 8 for w in widths)


def is_hopper(kernel: Any) -> bool:
    return any(kernel is other for other, _ in KERNELS.values())


def described(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel, with tensor descriptors in place of arrays where it wants them."""
    names = next((arrays for other, arrays in KERNELS.values() if other is kernel), ())
    blocks = arguments["C"].blocks
    made = {}
    for name in names:
        if arguments[name] is not None:
            rows = blocks.queries if kind(name) in ("query", "output") else blocks.keys
            made[name] = _descriptor(arguments[name], rows)
    return arguments | made


def _descriptor(array: jax.Array, rows: int) -> jax_triton.TensorDescriptor:
    """Tiles of so many rows of one head, as wide as in registers: zeros beyond the array's own width and length."""
    array = array.reshape(-1, *array.shape[-3:])
    width = tiles.padded(array.shape[-1])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * width, 128), element_bitwidth=16, rank=4)
    return jax_triton.TensorDescriptor.from_array(array, [1, rows, 1, width], layout=layout)
