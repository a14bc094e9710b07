"""Order one from the log-sum-exp: d_query by blocks of queries, d_key and d_value by blocks of keys."""

import triton
import triton.language as tl

from jttt.kernels import tiles


@triton.jit
def d_query_kernel(query, key, value, lse, d_output, delta, T, S, d_query, C: tl.constexpr):
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = tiles.program(tl.cdiv(T, BLOCK_T), C.layout.query.heads, C.band.right is not None)
    kv_head = head // C.group
    start = block * BLOCK_T

    q = tiles.load_rows(query, C.layout.query, batch, head, start, T, BLOCK_T, True)
    do = tiles.load_rows(d_output, C.layout.d_output, batch, head, start, T, BLOCK_T, True)
    lse_rows = tiles.load_lse(lse, C.layout.lse, batch, head, start, T, BLOCK_T)[:, None]
    delta_rows = tiles.load_column(delta, C.layout.delta, batch, head, start, T, BLOCK_T)[:, None]
    rows = (start + tl.arange(0, BLOCK_T))[:, None]
    dq = tl.zeros([BLOCK_T, tiles.padded(C.layout.query.width)], tl.float32)

    begin, full_begin, full_end, end = tiles.block_bounds(
        start, tl.minimum(start + BLOCK_T, T) - 1, S, C.band.left, C.band.right, BLOCK_S)
    for MASKED in tl.static_range(2):
        for i in range(tiles.block_count(begin, full_begin, full_end, end, MASKED)):
            key_start = tiles.block_at(i, begin, full_begin, full_end, MASKED) * BLOCK_S
            columns = (key_start + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            p = tiles.probabilities(tiles.product(q, tl.trans(k), C), lse_rows, rows, columns, S, C, MASKED)
            ds = p * (tiles.product(do, tl.trans(v), C) - delta_rows)
            dq = tiles.product(ds, k, C, dq)
    tiles.store_rows(d_query, C.layout.d_query, batch, head, start, T, BLOCK_T, dq * C.scale)


@triton.jit
def d_key_value_kernel(query, key, value, lse, d_output, delta, T, S, d_key, d_value, C: tl.constexpr):
    """d_key or d_value is None where it is not wanted. Tiles are transposed here, keys along rows;
    one program sums over the query heads of its key head."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, kv_head, batch = tiles.program(tl.cdiv(S, BLOCK_S), C.layout.key.heads, False)
    start = block * BLOCK_S
    k = tiles.load_rows(key, C.layout.key, batch, kv_head, start, S, BLOCK_S, True)
    columns = (start + tl.arange(0, BLOCK_S))[:, None]
    if d_key is not None:
        v = tiles.load_rows(value, C.layout.value, batch, kv_head, start, S, BLOCK_S, True)
        dk = tl.zeros([BLOCK_S, tiles.padded(C.layout.key.width)], tl.float32)
    if d_value is not None:
        dv = tl.zeros([BLOCK_S, tiles.padded(C.layout.value.width)], tl.float32)

    begin, full_begin, full_end, end = tiles.block_bounds(
        start, tl.minimum(start + BLOCK_S, S) - 1, T, C.band.right, C.band.left, BLOCK_T)
    for MASKED in tl.static_range(2):
        count = tiles.block_count(begin, full_begin, full_end, end, MASKED)
        for i in range(C.group * count):
            head = kv_head * C.group + i // count
            query_start = tiles.block_at(i % count, begin, full_begin, full_end, MASKED) * BLOCK_T
            rows = (query_start + tl.arange(0, BLOCK_T))[None, :]

            q = tiles.load_rows(query, C.layout.query, batch, head, query_start, T, BLOCK_T, MASKED)
            do = tiles.load_rows(d_output, C.layout.d_output, batch, head, query_start, T, BLOCK_T, MASKED)
            lse_rows = tiles.load_lse(lse, C.layout.lse, batch, head, query_start, T, BLOCK_T)[None, :]
            p = tiles.probabilities(tiles.product(k, tl.trans(q), C), lse_rows, rows, columns, S, C, MASKED)
            if d_value is not None:
                dv = tiles.product(p, do, C, dv)
            if d_key is not None:
                delta_rows = tiles.load_column(delta, C.layout.delta, batch, head, query_start, T, BLOCK_T)[None, :]
                ds = p * (tiles.product(v, tl.trans(do), C) - delta_rows)
                dk = tiles.product(ds, q, C, dk)

    if d_key is not None:
        tiles.store_rows(d_key, C.layout.d_key, batch, kv_head, start, S, BLOCK_S, dk * C.scale)
    if d_value is not None:
        tiles.store_rows(d_value, C.layout.d_value, batch, kv_head, start, S, BLOCK_S, dv)
