"""What is visible to whom.

Every way of hiding keys folds into four kinds before an implementation sees it:

    a rule on positions         `spec.Band`: causal, windows, a static query offset; nothing is loaded
    a range of keys per query   key_start, key_end, int32 [..., T]: lengths, a traced offset, ranges
    segment ids                 query_segments [..., T] and key_segments [..., S], int32; equal and
                                not negative where a query sees a key
    a dense mask                mask, bool [..., N or 1, T or 1, S or 1]

A key is visible where all kinds that are present say so. This file holds what each of them means,
entry by entry (`visible`, for the reference) and tile by tile (`tile_status`, for the kernels),
and the folding of the public arguments (`key_ranges`).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jttt.spec import Band

# The arrays of the last three kinds, by the names under which they travel.
OPERANDS = ("key_start", "key_end", "query_segments", "key_segments", "mask", "mask_summary")

# Side of the squares in which a dense mask is summarised, once for all passes; every block size is
# a multiple of it.
SQUARE = 16

HIDDEN, MIXED, FULL = 0, 1, 2

Arrays = Mapping[str, jax.Array | None]


def visible(band: Band, masks: Arrays, queries: int, keys: int) -> jax.Array | None:
    """Boolean, broadcastable to `[..., N, T, S]`: True where query t sees key s. None: everywhere."""
    front = (1,) * _axes_in_front(masks)
    t, s = jnp.arange(queries).reshape(*front, -1, 1), jnp.arange(keys).reshape(*front, 1, -1)
    rules = []
    if band.left is not None:
        rules.append(s >= t - band.left)
    if band.right is not None:
        rules.append(s <= t + band.right)
    if masks.get("key_start") is not None:
        start, end = (masks[name][..., None, :, None] for name in ("key_start", "key_end"))
        rules.append((s >= start) & (s < end))
    if masks.get("query_segments") is not None:
        ids = masks["query_segments"][..., None, :, None]
        rules.append((ids == masks["key_segments"][..., None, None, :]) & (ids >= 0))
    if masks.get("mask") is not None:
        rules.append(masks["mask"])
    seen = None
    for rule in rules:
        seen = rule if seen is None else seen & rule
    return seen


def key_ranges(start: jax.Array | None, end: jax.Array | None, query_lengths: jax.Array | None,
               key_lengths: jax.Array | None, band: Band, offset: jax.Array | None, queries: int, keys: int
               ) -> tuple[jax.Array, jax.Array]:
    """`(key_start, key_end)`, int32 `[B or 1, T]`, of what limits each query to a range of keys.

    start and end are `[B or 1, T or 1]`, lengths and offset `[B or 1]`. `band` is folded in only
    if there is a traced offset, by which it is shifted.
    """
    t = jnp.arange(queries)[None, :]
    starts = [jnp.zeros((1, queries), jnp.int32)]
    ends = [jnp.full((1, queries), keys, jnp.int32)]
    if start is not None:
        starts.append(start)
    if end is not None:
        ends.append(end)
    if key_lengths is not None:
        ends.append(key_lengths[:, None])
    if query_lengths is not None:
        ends.append(jnp.where(t < query_lengths[:, None], keys, 0))
    if offset is not None:
        if band.left is not None:
            starts.append(t + _sum(offset, -band.left, queries + keys)[:, None])
        if band.right is not None:
            ends.append(t + _sum(offset, band.right, queries + keys)[:, None] + 1)
    start, end = starts[0], ends[0]
    for limit in starts[1:]:
        start = jnp.maximum(start, limit)
    for limit in ends[1:]:
        end = jnp.minimum(end, limit)
    return start.astype(jnp.int32), end.astype(jnp.int32)


def _sum(offset: jax.Array, by: int, limit: int) -> jax.Array:
    """offset + by, clipped to ±limit before it can overflow; further away nothing changes."""
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    by = max(-most, min(by, most))
    return jnp.clip(offset, max(-limit - by, least), min(limit - by, most)) + by


def summarise(mask: jax.Array) -> jax.Array:
    """int8 `[..., N or 1, ⌈T/16⌉ or 1, ⌈S/16⌉ or 1]`: HIDDEN, MIXED or FULL for each square of a mask."""
    some, every = (_reduced(mask, SQUARE, SQUARE, *how) for how in ((jnp.any, False), (jnp.all, True)))
    return (some.astype(jnp.int8) + every.astype(jnp.int8)).astype(jnp.int8)


def tile_status(band: Band, masks: Arrays, queries: int, keys: int, rows: int, columns: int) -> jax.Array:
    """int8 `[..., N or 1, ⌈T/rows⌉, ⌈S/columns⌉]`: HIDDEN, MIXED or FULL for each tile.

    FULL tiles lie wholly within T and S. A tile that is called MIXED may in fact be hidden, where
    finding out would take a look at every entry.
    """
    front = (1,) * _axes_in_front(masks)
    t0 = jnp.arange(-(-queries // rows), dtype=jnp.int32).reshape(*front, -1, 1) * rows
    s0 = jnp.arange(-(-keys // columns), dtype=jnp.int32).reshape(*front, 1, -1) * columns
    t1, s1 = jnp.minimum(t0 + rows, queries) - 1, jnp.minimum(s0 + columns, keys) - 1
    some = (t0 >= 0) & (s0 >= 0)
    every = (t0 + rows <= queries) & (s0 + columns <= keys)
    if band.left is not None:
        some &= s1 >= t0 - band.left
        every &= s0 >= t1 - band.left
    if band.right is not None:
        some &= s0 <= t1 + band.right
        every &= s1 <= t0 + band.right
    if masks.get("key_start") is not None:
        start, end = masks["key_start"], masks["key_end"]
        limit = jnp.iinfo(jnp.int32).max
        first = _along_rows(jnp.where(start < end, start, limit), rows, jnp.min, limit)
        last = _along_rows(jnp.where(start < end, end, 0), rows, jnp.max, 0)
        some &= (first <= s1) & (last > s0)
        every &= _along_rows(start, rows, jnp.max, 0) <= s0
        every &= _along_rows(end, rows, jnp.min, limit) > s1
    if masks.get("query_segments") is not None:
        q_low, q_high, q_one = _segments(masks["query_segments"], rows)
        k_low, k_high, k_one = (jnp.swapaxes(x, -1, -2) for x in _segments(masks["key_segments"], columns))
        some &= (q_low <= k_high) & (k_low <= q_high)
        every &= q_one & k_one & (q_low == k_low)
    if masks.get("mask_summary") is not None:
        summary = masks["mask_summary"]
        some &= _reduced(summary != HIDDEN, rows // SQUARE, columns // SQUARE, jnp.any, False)
        every &= _reduced(summary == FULL, rows // SQUARE, columns // SQUARE, jnp.all, True)
    return jnp.where(some, jnp.where(every, FULL, MIXED), HIDDEN).astype(jnp.int8)


def key_blocks(status: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`block_list` of the keys that each block of queries meets, from a `tile_status`."""
    return block_list(status[..., None])


def query_blocks(status: jax.Array, key_heads: int) -> tuple[jax.Array, jax.Array]:
    """`block_list` of the queries that each block of keys meets, of all heads that share it."""
    *front, heads, rows, columns = status.shape
    if heads == 1:
        return block_list(jnp.swapaxes(status, -1, -2)[..., None])
    grouped = status.reshape(*front, key_heads, heads // key_heads, rows, columns)
    return block_list(jnp.moveaxis(grouped, (-1, -2, -3), (-3, -2, -1)))


def block_list(status: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tiles to visit for each block, `status` being `[..., block, other block, member]`: where heads of a group
    differ, each has tiles of its own.

    Returns int32 of the same shape, tile `other · members + member` for those that are FULL, then for those that are
    MIXED, each in order, then the rest; and int32 `[..., block, 2]`, how many there are of the two kinds.
    """
    tiles = status.reshape(*status.shape[:-2], -1)
    order = jnp.argsort(FULL - tiles, axis=-1, stable=True).astype(jnp.int32)
    counts = [jnp.sum(tiles == kind, axis=-1, dtype=jnp.int32) for kind in (FULL, MIXED)]
    return order.reshape(status.shape), jnp.stack(counts, axis=-1)


def _axes_in_front(masks: Arrays) -> int:
    """How many axes, of the batch and of heads, precede T and S in what the masks hide. Positions get as many, so that
    nothing here depends on `jax.numpy_rank_promotion`."""
    for name, own in (("key_start", 1), ("query_segments", 1), ("mask", 3), ("mask_summary", 3)):
        if masks.get(name) is not None:
            return masks[name].ndim - own + 1
    return 1


def _padded(x: jax.Array, axis: int, multiple: int, fill) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=fill)


def _reduced(x: jax.Array, rows: int, columns: int, reduce, fill) -> jax.Array:
    """`reduce` over rows × columns blocks of the last two axes; an axis of size one stays."""
    for axis, block in ((-2, rows), (-1, columns)):
        if x.shape[axis] > 1:
            x = _padded(x, axis, block, fill)
            axis += x.ndim
            x = reduce(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1:]), axis=axis + 1)
    return x


def _along_rows(x: jax.Array, rows: int, reduce, fill) -> jax.Array:
    """`reduce` over blocks of the last axis: `[..., T]` to `[..., 1, ⌈T/rows⌉, 1]`."""
    x = _padded(x, -1, rows, fill)
    return reduce(x.reshape(*x.shape[:-1], -1, rows), axis=-1)[..., None, :, None]


def _segments(ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lowest and highest id of each block, negative ones left out, and whether there is just one."""
    limit = jnp.iinfo(jnp.int32).max
    low = _along_rows(jnp.where(ids < 0, limit, ids), rows, jnp.min, limit)
    high = _along_rows(jnp.where(ids < 0, -1, ids), rows, jnp.max, -1)
    return low, high, (low == high) & (_along_rows(ids, rows, jnp.min, limit) >= 0)
