"""Order two. The tangent of attention along a direction, one sweep over the keys of each block of
queries; then g_query by blocks of queries, g_key and g_value by blocks of keys, g_bias by tiles.

Names follow the design note: A is the tangent of the scores, R their gradient, E that of P as value
sees it. Each part of the direction, t_query, t_key, t_value, t_bias, t_sinks, may be None: the
products in which it stands are not made.
"""

import triton
import triton.language as tl

from jttt.kernels import schedule, tiles


@triton.jit
def product_tangent(left, right, t_left, t_right, C: tl.constexpr):
    """Tangent of the scaled products, scale · (t_left · rightᵀ + left · t_rightᵀ); left and right are
    query and key, or key and query."""
    if t_left is not None:
        z = tiles.product(t_left, tl.trans(right), C)
        if t_right is not None:
            z = tiles.product(left, tl.trans(t_right), C, z)
        return z * C.scale
    elif t_right is not None:
        return tiles.product(left, tl.trans(t_right), C) * C.scale
    else:
        return None


@triton.jit
def score_tangent(x, z, t_bias, at, rows, columns, C: tl.constexpr):
    """A, from the tangent z of the scaled products and that of the bias; None where both are."""
    if t_bias is None:
        return None if z is None else tiles.through_cap(z, x, C)
    else:
        a = tiles.load_dense(t_bias, C.layout.t_bias, at, rows, columns).to(tl.float32)
        if z is not None:
            a += tiles.through_cap(z, x, C)
        return a


@triton.jit
def centred(a, mean):
    """A − a: what P is multiplied by to give E, its tangent. None where the direction moves no score; with
    mean but without A, sinks alone move them."""
    if mean is None:
        return None
    elif a is None:
        return -mean
    else:
        return a - mean


@triton.jit
def second_gradient(dp, a, w, zeros):
    """What R is P times of, without dO · t_valueᵀ; dp is dP − D' and a is A − a, both None where nothing moves the
    scores."""
    if a is None:
        return zeros - w
    else:
        return dp * a - w


@triton.jit
def second_through_cap(r, ds, x, z, C: tl.constexpr):
    """The gradient of the scaled products at order two, from R and dS; z, their tangent, may be None."""
    rz = tiles.through_cap(r, x, C)
    if C.soft_cap is not None and z is not None:
        rz -= (2 / C.soft_cap) * x * tiles.through_cap(z * ds, x, C)
    return rz


@triton.jit
def tangent_kernel(query, key, value, bias, sinks, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, output, lse, lse_tail, d_output, t_query, t_key, t_value, t_bias, t_sinks,
                   T, S, t_output, t_lse, row_term, C: tl.constexpr):
    """t_output is None where only the columns are wanted; row_term, with d_output, in forward mode."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = schedule.query_program(T, S, C)
    kv_head = head // C.group
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    t0 = block * BLOCK_T
    rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
    q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
    tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, t0, T, BLOCK_T, True)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    acc = tl.zeros([BLOCK_T, tiles.padded(C.layout.value.width)], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)

    walk = schedule.walk_keys(block, block_list, block_counts, batch, head, T, S, C)
    for MASKED in tl.static_range(2):
        for i in range(schedule.steps(walk, MASKED)):
            key_block, _ = schedule.step(walk, i, MASKED)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, MASKED)
            tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, s0, S, BLOCK_S, MASKED)
            x = tiles.capped(tiles.product(q, tl.trans(k), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            if t_value is not None:
                tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, s0, S, BLOCK_S, MASKED)
                acc = tiles.product(p, tv, C, acc)
            z = product_tangent(q, k, tq, tk, C)
            if z is not None or t_bias is not None:
                v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, MASKED)
                # The row sum is of the rounded numbers that meet value: they cancel against it in t_output.
                pa = (p * score_tangent(x, z, t_bias, at, rows, columns, C)).to(v.dtype)
                total += tl.sum(pa.to(tl.float32), 1)
                acc = tiles.product(pa, v, C, acc)

    mean = total[:, None]
    if t_sinks is not None:
        sink = tiles.load_column(sinks, C.layout.sinks, batch, head, 1, 0).to(tl.float32)
        t_sink = tiles.load_column(t_sinks, C.layout.t_sinks, batch, head, 1, 0).to(tl.float32)
        mean += t_sink * tiles.exponential(sink * tiles.unit(C) - log_sum, C)
    o = tiles.load_rows(output, C.layout.output, batch, head, t0, T, BLOCK_T, True)
    acc -= mean * o.to(tl.float32)
    if t_output is not None:
        tiles.store_rows(t_output, C.layout.t_output, batch, head, t0, T, BLOCK_T, acc)
    tiles.store_column(t_lse, C.layout.t_lse, batch, head, T, rows, mean)
    if row_term is not None:
        do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, True)
        w = tl.sum(acc * do.to(tl.float32), 1, keep_dims=True)
        tiles.store_column(row_term, C.layout.row_term, batch, head, T, rows, w)


@triton.jit
def g_query_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, lse, lse_tail, d_output, delta, t_lse, row_term, t_query, t_key, t_value,
                   t_bias, T, S, g_query, C: tl.constexpr):
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = schedule.query_program(T, S, C)
    kv_head = head // C.group
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    t0 = block * BLOCK_T
    rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
    q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
    do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, True)
    tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, t0, T, BLOCK_T, True)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
    mean = tiles.load_optional_column(t_lse, C.layout.t_lse, batch, head, T, rows)
    w = tiles.load_column(row_term, C.layout.row_term, batch, head, T, rows)
    gq = tl.zeros([BLOCK_T, tiles.padded(C.layout.query.width)], tl.float32)

    walk = schedule.walk_keys(block, block_list, block_counts, batch, head, T, S, C)
    for MASKED in tl.static_range(2):
        for i in range(schedule.steps(walk, MASKED)):
            key_block, _ = schedule.step(walk, i, MASKED)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, MASKED)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, MASKED)
            tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, s0, S, BLOCK_S, MASKED)
            tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, s0, S, BLOCK_S, MASKED)
            x = tiles.capped(tiles.product(q, tl.trans(k), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            z = product_tangent(q, k, tq, tk, C)
            dp = None if mean is None else tiles.product(do, tl.trans(v), C) - row_delta
            ds = None if mean is None else p * dp
            a = centred(score_tangent(x, z, t_bias, at, rows, columns, C), mean)
            r = second_gradient(dp, a, w, tl.zeros(p.shape, tl.float32))
            if tv is not None:
                r = tiles.product(do, tl.trans(tv), C, r)
            gq = tiles.product(second_through_cap(p * r, ds, x, z, C), k, C, gq)
            if t_key is not None:
                gq = tiles.product(tiles.through_cap(ds, x, C), tk, C, gq)
    tiles.store_rows(g_query, C.layout.g_query, batch, head, t0, T, BLOCK_T, gq * C.scale)


@triton.jit
def g_key_value_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                       block_list, block_counts, lse, lse_tail, d_output, delta, t_lse, row_term, t_query, t_key,
                       t_value, t_bias, T, S, g_key, g_value, C: tl.constexpr):
    """g_key or g_value is None where it is not wanted. Tiles are transposed here, keys along rows;
    one program sums over the query heads of its key head."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, kv_head, batch = schedule.key_program(T, S, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    s0 = block * BLOCK_S
    columns = (s0 + tl.arange(0, BLOCK_S))[:, None]
    k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, True)
    v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, True)
    tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, s0, S, BLOCK_S, True)
    tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, s0, S, BLOCK_S, True)
    if g_key is not None:
        gk = tl.zeros([BLOCK_S, tiles.padded(C.layout.key.width)], tl.float32)
    if g_value is not None:
        gv = tl.zeros([BLOCK_S, tiles.padded(C.layout.value.width)], tl.float32)

    walk = schedule.walk_queries(block, block_list, block_counts, batch, kv_head, T, S, C)
    for MASKED in tl.static_range(2):
        for i in range(schedule.steps(walk, MASKED)):
            query_block, head = schedule.step(walk, i, MASKED)
            t0 = query_block * BLOCK_T
            at = (batch, head, T, S, t0, s0)
            rows = (t0 + tl.arange(0, BLOCK_T))[None, :]
            q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, MASKED)
            do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, MASKED)
            tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, t0, T, BLOCK_T, MASKED)
            log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
            mean = tiles.load_optional_column(t_lse, C.layout.t_lse, batch, head, T, rows)
            w = tiles.load_column(row_term, C.layout.row_term, batch, head, T, rows)
            x = tiles.capped(tiles.product(k, tl.trans(q), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            z = product_tangent(k, q, tk, tq, C)
            a = centred(score_tangent(x, z, t_bias, at, rows, columns, C), mean)
            if g_value is not None:
                gv = tiles.product(p * a, do, C, gv)
            if g_key is not None:
                dp = None if mean is None else tiles.product(v, tl.trans(do), C) - row_delta
                ds = None if mean is None else p * dp
                r = second_gradient(dp, a, w, tl.zeros(p.shape, tl.float32))
                if tv is not None:
                    r = tiles.product(tv, tl.trans(do), C, r)
                gk = tiles.product(second_through_cap(p * r, ds, x, z, C), q, C, gk)
                if t_query is not None:
                    gk = tiles.product(tiles.through_cap(ds, x, C), tq, C, gk)

    if g_key is not None:
        tiles.store_rows(g_key, C.layout.g_key, batch, kv_head, s0, S, BLOCK_S, gk * C.scale)
    if g_value is not None:
        tiles.store_rows(g_value, C.layout.g_value, batch, kv_head, s0, S, BLOCK_S, gv)


@triton.jit
def g_bias_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                  tile_status, lse, lse_tail, d_output, delta, t_lse, row_term, t_query, t_key, t_value, t_bias,
                  T, S, g_bias, C: tl.constexpr):
    """One program a tile of bias, summing over the tiles, heads and batch along which it is broadcast."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    row_block, column_block, bias_head, bias_batch = schedule.bias_program(T, S, C)
    acc = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    for i in range(schedule.bias_shares(T, S, C)):
        row, column, head, batch = schedule.bias_share(i, row_block, column_block, bias_head, bias_batch, T, S, C)
        if not schedule.bias_tile_is_hidden(tile_status, row, column, head, batch, T, S, C):
            t0 = row * BLOCK_T
            s0 = column * BLOCK_S
            kv_head = head // C.group
            rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + tl.arange(0, BLOCK_S))[None, :]
            q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
            do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, True)
            tq = tiles.load_rows(t_query, C.layout.t_query, batch, head, t0, T, BLOCK_T, True)
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, True)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, True)
            tk = tiles.load_rows(t_key, C.layout.t_key, batch, kv_head, s0, S, BLOCK_S, True)
            tv = tiles.load_rows(t_value, C.layout.t_value, batch, kv_head, s0, S, BLOCK_S, True)
            log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
            mean = tiles.load_optional_column(t_lse, C.layout.t_lse, batch, head, T, rows)
            w = tiles.load_column(row_term, C.layout.row_term, batch, head, T, rows)
            x = tiles.capped(tiles.product(q, tl.trans(k), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, True)
            z = product_tangent(q, k, tq, tk, C)
            dp = None if mean is None else tiles.product(do, tl.trans(v), C) - row_delta
            a = centred(score_tangent(x, z, t_bias, at, rows, columns, C), mean)
            r = second_gradient(dp, a, w, tl.zeros(p.shape, tl.float32))
            if tv is not None:
                r = tiles.product(do, tl.trans(tv), C, r)
            acc += p * r
    tiles.store_bias(g_bias, C.layout.g_bias, row_block, column_block, bias_head, bias_batch, T, S, acc, C)
