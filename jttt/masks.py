"""What is visible to whom, as a dense array, for the reference.

The kernels know the same rules tile by tile (`jttt/kernels/tiles.py`) and never build this array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jttt.spec import Band


def visible(band: Band, queries: int, keys: int) -> jax.Array | None:
    """Boolean `[T, S]`, True where query t sees key s; None where everything is visible."""
    if band == Band():
        return None
    distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    seen = jnp.ones((queries, keys), bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return seen
