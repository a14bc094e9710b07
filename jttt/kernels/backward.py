"""Order one from the log-sum-exp: d_query by blocks of queries, d_key and d_value by blocks of keys,
d_bias by tiles."""

import triton
import triton.language as tl

from jttt.kernels import schedule, tiles


@triton.jit
def d_query_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, lse, lse_tail, d_output, delta, T, S, d_query, C: tl.constexpr):
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = schedule.query_program(T, S, C)
    kv_head = head // C.group
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    t0 = block * BLOCK_T
    rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
    q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
    do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, True)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
    dq = tl.zeros([BLOCK_T, tiles.padded(C.layout.query.width)], tl.float32)

    walk = schedule.walk_keys(block, block_list, block_counts, batch, head, T, S, C)
    for MASKED in tl.static_range(2):
        for i in range(schedule.steps(walk, MASKED)):
            key_block, _ = schedule.step(walk, i, MASKED)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + tl.arange(0, BLOCK_S))[None, :]
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, MASKED)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, MASKED)
            x = tiles.capped(tiles.product(q, tl.trans(k), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            ds = p * (tiles.product(do, tl.trans(v), C) - row_delta)
            dq = tiles.product(tiles.through_cap(ds, x, C), k, C, dq)
    tiles.store_rows(d_query, C.layout.d_query, batch, head, t0, T, BLOCK_T, dq * C.scale)


@triton.jit
def d_key_value_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                       block_list, block_counts, lse, lse_tail, d_output, delta, T, S, d_key, d_value, C: tl.constexpr):
    """d_key or d_value is None where it is not wanted. Tiles are transposed here, keys along rows;
    one program sums over the query heads of its key head."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, kv_head, batch = schedule.key_program(T, S, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    s0 = block * BLOCK_S
    columns = (s0 + tl.arange(0, BLOCK_S))[:, None]
    k = tiles.load_rows(key, C.layout.key, batch, kv_head, s0, S, BLOCK_S, True)
    if d_key is not None:
        v = tiles.load_rows(value, C.layout.value, batch, kv_head, s0, S, BLOCK_S, True)
        dk = tl.zeros([BLOCK_S, tiles.padded(C.layout.key.width)], tl.float32)
    if d_value is not None:
        dv = tl.zeros([BLOCK_S, tiles.padded(C.layout.value.width)], tl.float32)

    walk = schedule.walk_queries(block, block_list, block_counts, batch, kv_head, T, S, C)
    for MASKED in tl.static_range(2):
        for i in range(schedule.steps(walk, MASKED)):
            query_block, head = schedule.step(walk, i, MASKED)
            t0 = query_block * BLOCK_T
            at = (batch, head, T, S, t0, s0)
            rows = (t0 + tl.arange(0, BLOCK_T))[None, :]
            q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, MASKED)
            do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, MASKED)
            log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            x = tiles.capped(tiles.product(k, tl.trans(q), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            if d_value is not None:
                dv = tiles.product(p, do, C, dv)
            if d_key is not None:
                row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
                ds = p * (tiles.product(v, tl.trans(do), C) - row_delta)
                dk = tiles.product(tiles.through_cap(ds, x, C), q, C, dk)

    if d_key is not None:
        tiles.store_rows(d_key, C.layout.d_key, batch, kv_head, s0, S, BLOCK_S, dk * C.scale)
    if d_value is not None:
        tiles.store_rows(d_value, C.layout.d_value, batch, kv_head, s0, S, BLOCK_S, dv)


@triton.jit
def d_bias_kernel(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                  tile_status, lse, lse_tail, d_output, delta, T, S, d_bias, C: tl.constexpr):
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
            rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + tl.arange(0, BLOCK_S))[None, :]
            q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
            do = tiles.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, True)
            k = tiles.load_rows(key, C.layout.key, batch, head // C.group, s0, S, BLOCK_S, True)
            v = tiles.load_rows(value, C.layout.value, batch, head // C.group, s0, S, BLOCK_S, True)
            log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
            x = tiles.capped(tiles.product(q, tl.trans(k), C), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, True)
            acc += p * (tiles.product(do, tl.trans(v), C) - row_delta)
    tiles.store_bias(d_bias, C.layout.d_bias, row_block, column_block, bias_head, bias_batch, T, S, acc, C)
