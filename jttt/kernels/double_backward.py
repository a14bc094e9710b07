"""Order two. The tangent of attention along (t_query, t_key, t_value), one sweep over the keys of
each block of queries; then g_query by blocks of queries, g_key and g_value by blocks of keys.

Names follow the design note: A is the tangent of the scores, R the gradient of the scores, E that
of P seen from value. Any of t_query, t_key, t_value may be None, a direction that is zero: the
products it stands in are not made.
"""

import triton
import triton.language as tl

from jttt.kernels import tiles


@triton.jit
def score_tangent(left, right, t_left, t_right, C: tl.constexpr):
    """A = scale · (t_left · rightᵀ + left · t_rightᵀ), for either of (query, key) and (key, query)."""
    if t_left is None:
        a = tiles.product(left, tl.trans(t_right), C)
    else:
        a = tiles.product(t_left, tl.trans(right), C)
        if t_right is not None:
            a = tiles.product(left, tl.trans(t_right), C, a)
    return a * C.scale


@triton.jit
def tangent_kernel(query, key, value, output, lse, d_output, delta, t_query, t_key, t_value, T, S,
                   t_output, t_lse, row_term, C: tl.constexpr):
    """t_output is None where only the row columns are wanted."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = tiles.program(tl.cdiv(T, BLOCK_T), C.layout.query.heads, C.band.right is not None)
    kv_head = head // C.group
    start = block * BLOCK_T
    q = tiles.load_rows(query, C.layout.query, batch, head, start, T, BLOCK_T, True)
    tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, start, T, BLOCK_T, True)
    lse_rows = tiles.load_lse(lse, C.layout.lse, batch, head, start, T, BLOCK_T)[:, None]
    rows = (start + tl.arange(0, BLOCK_T))[:, None]
    acc = tl.zeros([BLOCK_T, tiles.padded(C.layout.value.width)], tl.float32)
    mean = tl.zeros([BLOCK_T], tl.float32)

    begin, full_begin, full_end, end = tiles.block_bounds(
        start, tl.minimum(start + BLOCK_T, T) - 1, S, C.band.left, C.band.right, BLOCK_S)
    for MASKED in tl.static_range(2):
        for i in range(tiles.block_count(begin, full_begin, full_end, end, MASKED)):
            key_start = tiles.block_at(i, begin, full_begin, full_end, MASKED) * BLOCK_S
            columns = (key_start + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            p = tiles.probabilities(tiles.product(q, tl.trans(k), C), lse_rows, rows, columns, S, C, MASKED)
            tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            if t_value is not None:
                acc = tiles.product(p, tv, C, acc)
            if t_query is not None or t_key is not None:
                tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
                v = tiles.load_rows(value, C.layout.value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
                pa = p * score_tangent(q, k, tq, tk, C)
                mean += tl.sum(pa, 1)
                acc = tiles.product(pa, v, C, acc)

    if t_query is not None or t_key is not None:
        o = tiles.load_rows(output, C.layout.output, batch, head, start, T, BLOCK_T, True)
        acc -= mean[:, None] * o.to(tl.float32)
    do = tiles.load_rows(d_output, C.layout.d_output, batch, head, start, T, BLOCK_T, True)
    delta_rows = tiles.load_column(delta, C.layout.delta, batch, head, start, T, BLOCK_T)
    w = tl.sum(acc * do.to(tl.float32), 1) - mean * delta_rows
    if t_output is not None:
        tiles.store_rows(t_output, C.layout.t_output, batch, head, start, T, BLOCK_T, acc)
    tiles.store_column(t_lse, C.layout.t_lse, batch, head, start, T, BLOCK_T, mean)
    tiles.store_column(row_term, C.layout.row_term, batch, head, start, T, BLOCK_T, w)


@triton.jit
def g_query_kernel(query, key, value, lse, d_output, delta, t_lse, row_term, t_query, t_key, t_value, T, S,
                   g_query, C: tl.constexpr):
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = tiles.program(tl.cdiv(T, BLOCK_T), C.layout.query.heads, C.band.right is not None)
    kv_head = head // C.group
    start = block * BLOCK_T
    q = tiles.load_rows(query, C.layout.query, batch, head, start, T, BLOCK_T, True)
    do = tiles.load_rows(d_output, C.layout.d_output, batch, head, start, T, BLOCK_T, True)
    tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, start, T, BLOCK_T, True)
    lse_rows = tiles.load_lse(lse, C.layout.lse, batch, head, start, T, BLOCK_T)[:, None]
    delta_rows = tiles.load_column(delta, C.layout.delta, batch, head, start, T, BLOCK_T)[:, None]
    mean = tiles.load_column(t_lse, C.layout.t_lse, batch, head, start, T, BLOCK_T)[:, None]
    w = tiles.load_column(row_term, C.layout.row_term, batch, head, start, T, BLOCK_T)[:, None]
    rows = (start + tl.arange(0, BLOCK_T))[:, None]
    gq = tl.zeros([BLOCK_T, tiles.padded(C.layout.query.width)], tl.float32)

    begin, full_begin, full_end, end = tiles.block_bounds(
        start, tl.minimum(start + BLOCK_T, T) - 1, S, C.band.left, C.band.right, BLOCK_S)
    for MASKED in tl.static_range(2):
        for i in range(tiles.block_count(begin, full_begin, full_end, end, MASKED)):
            key_start = tiles.block_at(i, begin, full_begin, full_end, MASKED) * BLOCK_S
            columns = (key_start + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            p = tiles.probabilities(tiles.product(q, tl.trans(k), C), lse_rows, rows, columns, S, C, MASKED)
            r = -w
            if t_value is not None:
                r = tiles.product(do, tl.trans(tv), C) - w
            if t_query is not None or t_key is not None:
                a = score_tangent(q, k, tq, tk, C)
                dp = tiles.product(do, tl.trans(v), C)
                r += dp * (a - mean) - delta_rows * a
                if t_key is not None:
                    gq = tiles.product(p * (dp - delta_rows), tk, C, gq)
            gq = tiles.product(p * r, k, C, gq)
    tiles.store_rows(g_query, C.layout.g_query, batch, head, start, T, BLOCK_T, gq * C.scale)


@triton.jit
def g_key_value_kernel(query, key, value, lse, d_output, delta, t_lse, row_term, t_query, t_key, t_value, T, S,
                       g_key, g_value, C: tl.constexpr):
    """g_key or g_value is None where it is not wanted; g_value needs t_query or t_key. Tiles are
    transposed here, keys along rows; one program sums over the query heads of its key head."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, kv_head, batch = tiles.program(tl.cdiv(S, BLOCK_S), C.layout.key.heads, False)
    start = block * BLOCK_S
    k = tiles.load_rows(key, C.layout.key, batch, kv_head, start, S, BLOCK_S, True)
    columns = (start + tl.arange(0, BLOCK_S))[:, None]
    tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, start, S, BLOCK_S, True)
    if g_key is not None:
        v = tiles.load_rows(value, C.layout.value, batch, kv_head, start, S, BLOCK_S, True)
        gk = tl.zeros([BLOCK_S, tiles.padded(C.layout.key.width)], tl.float32)
        tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, start, S, BLOCK_S, True)
    if g_value is not None:
        gv = tl.zeros([BLOCK_S, tiles.padded(C.layout.value.width)], tl.float32)

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
            tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, query_start, T, BLOCK_T, MASKED)
            lse_rows = tiles.load_lse(lse, C.layout.lse, batch, head, query_start, T, BLOCK_T)[None, :]
            p = tiles.probabilities(tiles.product(k, tl.trans(q), C), lse_rows, rows, columns, S, C, MASKED)
            if t_query is not None or t_key is not None:
                mean = tiles.load_column(t_lse, C.layout.t_lse, batch, head, query_start, T, BLOCK_T)[None, :]
                a = score_tangent(k, q, tk, tq, C)
                if g_value is not None:
                    gv = tiles.product(p * (a - mean), do, C, gv)
            if g_key is not None:
                w = tiles.load_column(row_term, C.layout.row_term, batch, head, query_start, T, BLOCK_T)[None, :]
                r = -w
                if t_value is not None:
                    r = tiles.product(tv, tl.trans(do), C) - w
                if t_query is not None or t_key is not None:
                    delta_rows = tiles.load_column(delta, C.layout.delta, batch, head, query_start, T, BLOCK_T)[None, :]
                    dp = tiles.product(v, tl.trans(do), C)
                    r += dp * (a - mean) - delta_rows * a
                    if t_query is not None:
                        gk = tiles.product(p * (dp - delta_rows), tq, C, gk)
                gk = tiles.product(p * r, q, C, gk)

    if g_key is not None:
        tiles.store_rows(g_key, C.layout.g_key, batch, kv_head, start, S, BLOCK_S, gk * C.scale)
    if g_value is not None:
        tiles.store_rows(g_value, C.layout.g_value, batch, kv_head, start, S, BLOCK_S, gv)
