"""Order one on Hopper: d_query by blocks of queries, d_key and d_value by blocks of keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jttt.kernels import schedule, tiles
from jttt.kernels.hopper import per_row, stream


@gluon.jit
def d_query_hopper(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, lse, lse_tail, d_output, delta, T, S, d_query, C: gl.constexpr):
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = STAGES
    TILE: gl.constexpr = stream.accumulator(BLOCK_S, C)
    ROWS: gl.constexpr = stream.layouts(C, "query", "d_output")
    COLUMNS: gl.constexpr = stream.layouts(C, "key", "value")
    head, batch, t0, walk, full, count = stream.queries_at(T, S, block_list, block_counts, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    rows = (t0 + gl.arange(0, BLOCK_T, gl.SliceLayout(1, TILE)))[:, None]

    resident = stream.make((query, d_output), ROWS, BLOCK_T, 1)
    moving = stream.make((key, value), COLUMNS, BLOCK_S, STAGES)
    stream.publish()
    stream.fetch(resident, ROWS, BLOCK_T, batch, head, t0)
    stream.start(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, batch)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
    dq = stream.nothing(d_query, C.layout.d_query, BLOCK_T, C)
    zeros = gl.zeros([BLOCK_T, BLOCK_S], gl.float32, TILE)
    stream.wait(resident, 0, 1, True)
    q = stream.matrix(resident, 0, 0, ROWS, BLOCK_T)
    do = stream.matrix(resident, 1, 0, ROWS, BLOCK_T)

    for MASKED in gl.static_range(2):
        for i in range(full if MASKED else 0, count if MASKED else full):
            key_block, _ = schedule.visited(walk, i)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(0, TILE)))[None, :]
            stage = stream.arrive(moving, COLUMNS, BLOCK_S, STAGES, LEAD, count, i)
            k = stream.matrix(moving, 0, stage, COLUMNS, BLOCK_S)
            v = stream.matrix(moving, 1, stage, COLUMNS, BLOCK_S)
            x = stream.queue(q, k, zeros)
            dp = stream.queue(do, v, zeros)
            x = tiles.capped(stream.arrived(x, 1), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            ds = p * (stream.arrived(dp, 0) - row_delta)
            dq = stream.arrived(stream.accumulate(tiles.through_cap(ds, x, C), k, dq, C.layout.query, C), 0)
            stream.behind(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, i, batch)
    stream.store_rows(d_query, C.layout.d_query, batch, head, t0, T, BLOCK_T, dq * C.scale, C)


@gluon.jit
def d_key_value_hopper(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                       block_list, block_counts, lse, lse_tail, d_output, delta, T, S, d_key, d_value, C: gl.constexpr):
    """d_key or d_value is None where it is not wanted. Tiles are transposed here, keys along rows;
    one program sums over the query heads of its key head."""
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = STAGES
    TILE: gl.constexpr = stream.accumulator(BLOCK_T, C)
    COLUMNS: gl.constexpr = stream.layouts(C, "key", "value")
    ROWS: gl.constexpr = stream.layouts(C, "query", "d_output")
    NUMBERS: gl.constexpr = stream.layouts(C, "lse", "delta")
    ACROSS: gl.constexpr = gl.SliceLayout(0, TILE)
    block, kv_head, batch = schedule.key_program(T, S, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    s0 = block * BLOCK_S
    columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(1, TILE)))[:, None]

    resident = stream.make((key, value), COLUMNS, BLOCK_S, 1)
    moving = stream.make((query, d_output), ROWS, BLOCK_T, STAGES)
    numbers = per_row.make((lse, delta), BLOCK_T, STAGES)
    stream.publish()
    stream.fetch(resident, COLUMNS, BLOCK_S, batch, kv_head, s0)
    dk = stream.nothing(d_key, C.layout.d_key, BLOCK_S, C)
    dv = stream.nothing(d_value, C.layout.d_value, BLOCK_S, C)
    zeros = gl.zeros([BLOCK_S, BLOCK_T], gl.float32, TILE)
    k = stream.matrix(resident, 0, 0, COLUMNS, BLOCK_S)
    v = stream.matrix(resident, 1, 0, COLUMNS, BLOCK_S)
    stream.wait(resident, 0, 1, True)

    walk = schedule.walk_queries(block, block_list, block_counts, batch, kv_head, T, S, C)
    full = schedule.steps(walk, False)
    count = full + schedule.steps(walk, True)
    stream.start(moving, ROWS, BLOCK_T, STAGES, LEAD, walk, count, batch)
    per_row.start(numbers, NUMBERS, BLOCK_T, STAGES, LEAD, walk, count, batch, T)
    for MASKED in gl.static_range(2):
        for i in range(full if MASKED else 0, count if MASKED else full):
            query_block, head = schedule.visited(walk, i)
            t0 = query_block * BLOCK_T
            at = (batch, head, T, S, t0, s0)
            rows = (t0 + gl.arange(0, BLOCK_T, ACROSS))[None, :]
            stage = stream.arrive(moving, ROWS, BLOCK_T, STAGES, LEAD, count, i)
            q = stream.matrix(moving, 0, stage, ROWS, BLOCK_T)
            do = stream.matrix(moving, 1, stage, ROWS, BLOCK_T)
            per_row.arrive(numbers, STAGES, i)
            # Ahead of the products, with which it would have to share shared memory's bandwidth.
            log_sum = tiles.subtrahend(per_row.across(numbers, 0, stage, ACROSS), C)
            if bias is not None:
                # Past T the numbers are zeros, and the exponential of a bias may be infinite.
                log_sum = gl.where(rows < T, log_sum, float("inf"))
            x = stream.queue(k, q, zeros)
            dp = None if d_key is None else stream.queue(v, do, zeros)
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            x = tiles.capped(stream.arrived(x, 0 if d_key is None else 1), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            if d_value is not None:
                dv = stream.accumulate(p, do, dv, C.layout.value, C)
            if d_key is not None:
                row_delta = per_row.across(numbers, 1, stage, ACROSS)
                dp = stream.arrived(dp, 0 if d_value is None else 1)
                dk = stream.accumulate(tiles.through_cap(p * (dp - row_delta), x, C), q, dk, C.layout.key, C)
            dk, dv = stream.settled(dk, dv)
            stream.behind(moving, ROWS, BLOCK_T, STAGES, LEAD, walk, count, i, batch)
            per_row.behind(numbers, NUMBERS, BLOCK_T, STAGES, LEAD, walk, count, i, batch, T)

    if d_key is not None:
        stream.store_rows(d_key, C.layout.d_key, batch, kv_head, s0, S, BLOCK_S, dk * C.scale, C)
    if d_value is not None:
        stream.store_rows(d_value, C.layout.d_value, batch, kv_head, s0, S, BLOCK_S, dv, C)
