"""Order two on Hopper; see `jttt/kernels/double_backward.py`, whose mathematics of a tile this uses.

The products that a tile needs are queued at once, the scores first: probabilities are made of these
while the others run, and each later step waits for just what it needs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from jttt.kernels import schedule, tiles
from jttt.kernels.double_backward import centred, score_tangent, second_gradient, second_through_cap
from jttt.kernels.hopper import per_row, stream


@gluon.jit
def queue_tangent(left, right, t_left, t_right, zeros):
    """t_left · rightᵀ + left · t_rightᵀ, not waited for; None where the direction has neither."""
    if t_left is None:
        return stream.queue(left, t_right, zeros)
    else:
        z = stream.queue(t_left, right, zeros)
        if t_right is not None:
            z = warpgroup_mma(left, t_right.permute((1, 0)), z, is_async=True)
        return z


@gluon.jit
def tangent_hopper(query, key, value, bias, sinks, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, output, lse, lse_tail, d_output, t_query, t_key, t_value, t_bias, t_sinks,
                   T, S, t_output, t_lse, row_term, C: gl.constexpr):
    """t_output is None where only the columns are wanted; row_term, with d_output, in forward mode."""
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = stream.one_place_free(STAGES)
    TILE: gl.constexpr = stream.accumulator(BLOCK_S, C)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    OUTPUT: gl.constexpr = stream.accumulator(tiles.padded(C.layout.value.width), C)
    MOVED: gl.constexpr = C.layout.t_query is not None or C.layout.t_key is not None or C.layout.t_bias is not None
    TANGENTS: gl.constexpr = stream.products(C.layout.t_query, C.layout.t_key)
    ROWS: gl.constexpr = stream.layouts(C, "query", "t_query")
    COLUMNS: gl.constexpr = stream.layouts(C, "key", "t_key", "value", "t_value")
    head, batch, t0, walk, full, count = stream.queries_at(T, S, block_list, block_counts, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    rows = (t0 + gl.arange(0, BLOCK_T, ROW))[:, None]

    resident = stream.make((query, t_query), ROWS, BLOCK_T, 1)
    moving = stream.make((key, t_key, value, t_value), COLUMNS, BLOCK_S, STAGES)
    stream.publish()
    stream.fetch(resident, ROWS, BLOCK_T, batch, head, t0)
    stream.start(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, batch)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    acc = stream.nothing(output, C.layout.output, BLOCK_T, C)
    total = gl.zeros([BLOCK_T], gl.float32, ROW)
    zeros = gl.zeros([BLOCK_T, BLOCK_S], gl.float32, TILE)
    stream.wait(resident, 0, 1, True)
    q = stream.matrix(resident, 0, 0, ROWS, BLOCK_T).load(stream.left_operand(BLOCK_S, C))
    tq = stream.matrix(resident, 1, 0, ROWS, BLOCK_T)
    if tq is not None:
        tq = tq.load(stream.left_operand(BLOCK_S, C))

    for MASKED in gl.static_range(2):
        for i in range(full if MASKED else 0, count if MASKED else full):
            key_block, _ = schedule.visited(walk, i)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(0, TILE)))[None, :]
            stage = stream.arrive(moving, COLUMNS, BLOCK_S, STAGES, LEAD, count, i)
            k = stream.matrix(moving, 0, stage, COLUMNS, BLOCK_S)
            tk = stream.matrix(moving, 1, stage, COLUMNS, BLOCK_S)
            v = stream.matrix(moving, 2, stage, COLUMNS, BLOCK_S)
            tv = stream.matrix(moving, 3, stage, COLUMNS, BLOCK_S)
            x = stream.queue(q, k, zeros)
            z = queue_tangent(q, k, tq, tk, zeros)
            stream.ahead(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, i, batch)
            x = tiles.capped(stream.arrived(x, TANGENTS), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            if tv is not None:
                acc = stream.accumulate(p, tv, acc, C.layout.value, C)
            if MOVED:
                z = stream.arrived(z, 0 if tv is None else 1)
                if z is not None:
                    z = z * C.scale
                # The row sum is of the rounded numbers that meet value: they cancel against it in t_output.
                pa = (p * score_tangent(x, z, t_bias, at, rows, columns, C)).to(value.dtype)
                total += gl.sum(pa.to(gl.float32), 1)
                acc = stream.accumulate(pa, v, acc, C.layout.value, C)
            acc = stream.arrived(acc, 0)
            stream.behind(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, i, batch)

    rows = (t0 + gl.arange(0, BLOCK_T, gl.SliceLayout(1, OUTPUT)))[:, None]
    mean = gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
    if t_sinks is not None:
        sink = tiles.load_column(sinks, C.layout.sinks, batch, head, 1, 0).to(gl.float32)
        t_sink = tiles.load_column(t_sinks, C.layout.t_sinks, batch, head, 1, 0).to(gl.float32)
        log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
        mean += t_sink * tiles.exponential(sink * tiles.unit(C) - log_sum, C)
    acc -= mean * stream.load_rows(output, C.layout.output, batch, head, t0, T, BLOCK_T, C).to(gl.float32)
    if t_output is not None:
        stream.store_rows(t_output, C.layout.t_output, batch, head, t0, T, BLOCK_T, acc, C)
    tiles.store_column(t_lse, C.layout.t_lse, batch, head, T, rows, mean)
    if row_term is not None:
        do = stream.load_rows(d_output, C.layout.d_output, batch, head, t0, T, BLOCK_T, C).to(gl.float32)
        w = gl.sum(acc * do, 1)[:, None]
        tiles.store_column(row_term, C.layout.row_term, batch, head, T, rows, w)


@gluon.jit
def g_query_hopper(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, lse, lse_tail, d_output, delta, t_lse, row_term, t_query, t_key, t_value,
                   t_bias, T, S, g_query, C: gl.constexpr):
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = stream.one_place_free(STAGES)
    TILE: gl.constexpr = stream.accumulator(BLOCK_S, C)
    TANGENTS: gl.constexpr = stream.products(C.layout.t_query, C.layout.t_key)
    B: gl.constexpr = stream.products(C.layout.t_value)
    DP: gl.constexpr = stream.products(C.layout.t_lse)
    ROWS: gl.constexpr = stream.layouts(C, "query", "d_output", "t_query")
    COLUMNS: gl.constexpr = stream.layouts(C, "key", "value", "t_key", "t_value")
    head, batch, t0, walk, full, count = stream.queries_at(T, S, block_list, block_counts, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    rows = (t0 + gl.arange(0, BLOCK_T, gl.SliceLayout(1, TILE)))[:, None]

    resident = stream.make((query, d_output, t_query), ROWS, BLOCK_T, 1)
    moving = stream.make((key, value, t_key, t_value), COLUMNS, BLOCK_S, STAGES)
    stream.publish()
    stream.fetch(resident, ROWS, BLOCK_T, batch, head, t0)
    stream.start(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, batch)
    log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
    tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
    row_delta = tiles.load_column(delta, C.layout.delta, batch, head, T, rows)
    mean = tiles.load_optional_column(t_lse, C.layout.t_lse, batch, head, T, rows)
    w = tiles.load_column(row_term, C.layout.row_term, batch, head, T, rows)
    gq = stream.nothing(g_query, C.layout.g_query, BLOCK_T, C)
    zeros = gl.zeros([BLOCK_T, BLOCK_S], gl.float32, TILE)
    stream.wait(resident, 0, 1, True)
    q = stream.matrix(resident, 0, 0, ROWS, BLOCK_T)
    do = stream.matrix(resident, 1, 0, ROWS, BLOCK_T)
    tq = stream.matrix(resident, 2, 0, ROWS, BLOCK_T)

    for MASKED in gl.static_range(2):
        for i in range(full if MASKED else 0, count if MASKED else full):
            key_block, _ = schedule.visited(walk, i)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(0, TILE)))[None, :]
            stage = stream.arrive(moving, COLUMNS, BLOCK_S, STAGES, LEAD, count, i)
            k = stream.matrix(moving, 0, stage, COLUMNS, BLOCK_S)
            v = stream.matrix(moving, 1, stage, COLUMNS, BLOCK_S)
            tk = stream.matrix(moving, 2, stage, COLUMNS, BLOCK_S)
            tv = stream.matrix(moving, 3, stage, COLUMNS, BLOCK_S)
            x = stream.queue(q, k, zeros)
            dp = None if mean is None else stream.queue(do, v, zeros)
            z = queue_tangent(q, k, tq, tk, zeros)
            b = stream.queue(do, tv, zeros)
            stream.ahead(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, i, batch)
            x = tiles.capped(stream.arrived(x, DP + TANGENTS + B), C)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            dp = None if mean is None else stream.arrived(dp, TANGENTS + B) - row_delta
            ds = None if mean is None else p * dp
            if tk is not None:
                gq = stream.accumulate(tiles.through_cap(ds, x, C), tk, gq, C.layout.query, C)
            z = stream.arrived(z, B + (0 if tk is None else 1))
            b = stream.arrived(b, 0 if tk is None else 1)
            if z is not None:
                z = z * C.scale
            a = centred(score_tangent(x, z, t_bias, at, rows, columns, C), mean)
            r = second_gradient(dp, a, w, zeros)
            if b is not None:
                r += b
            gq = stream.accumulate(second_through_cap(p * r, ds, x, z, C), k, gq, C.layout.query, C)
            gq = stream.arrived(gq, 0)
            stream.behind(moving, COLUMNS, BLOCK_S, STAGES, LEAD, walk, count, i, batch)
    stream.store_rows(g_query, C.layout.g_query, batch, head, t0, T, BLOCK_T, gq * C.scale, C)


@gluon.jit
def g_key_value_hopper(query, key, value, bias, key_start, key_end, query_segments, key_segments, mask,
                       block_list, block_counts, lse, lse_tail, d_output, delta, t_lse, row_term, t_query, t_key,
                       t_value, t_bias, T, S, g_key, g_value, C: gl.constexpr):
    """g_key or g_value is None where it is not wanted. Tiles are transposed here, keys along rows;
    one program sums over the query heads of its key head."""
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = stream.one_place_free(STAGES)
    TILE: gl.constexpr = stream.accumulator(BLOCK_T, C)
    TANGENTS: gl.constexpr = stream.products(C.layout.t_query, C.layout.t_key)
    DP: gl.constexpr = stream.products(C.layout.t_lse) if C.layout.g_key is not None else 0
    COLUMNS: gl.constexpr = stream.layouts(C, "key", "value", "t_key", "t_value")
    ROWS: gl.constexpr = stream.layouts(C, "query", "d_output", "t_query")
    NUMBERS: gl.constexpr = stream.layouts(C, "t_lse", "delta", "row_term")
    ACROSS: gl.constexpr = gl.SliceLayout(0, TILE)
    block, kv_head, batch = schedule.key_program(T, S, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    s0 = block * BLOCK_S
    columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(1, TILE)))[:, None]

    resident = stream.make((key, value, t_key, t_value), COLUMNS, BLOCK_S, 1)
    moving = stream.make((query, d_output, t_query), ROWS, BLOCK_T, STAGES)
    numbers = per_row.make((t_lse, delta, row_term), BLOCK_T, STAGES)
    stream.publish()
    stream.fetch(resident, COLUMNS, BLOCK_S, batch, kv_head, s0)
    gk = stream.nothing(g_key, C.layout.g_key, BLOCK_S, C)
    gv = stream.nothing(g_value, C.layout.g_value, BLOCK_S, C)
    zeros = gl.zeros([BLOCK_S, BLOCK_T], gl.float32, TILE)
    k = stream.matrix(resident, 0, 0, COLUMNS, BLOCK_S)
    v = stream.matrix(resident, 1, 0, COLUMNS, BLOCK_S)
    tk = stream.matrix(resident, 2, 0, COLUMNS, BLOCK_S)
    tv = stream.matrix(resident, 3, 0, COLUMNS, BLOCK_S)
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
            log_sum = tiles.load_lse(lse, C.layout.lse, batch, head, T, rows, C)
            stage = stream.arrive(moving, ROWS, BLOCK_T, STAGES, LEAD, count, i)
            q = stream.matrix(moving, 0, stage, ROWS, BLOCK_T)
            do = stream.matrix(moving, 1, stage, ROWS, BLOCK_T)
            tq = stream.matrix(moving, 2, stage, ROWS, BLOCK_T)
            x = stream.queue(k, q, zeros)
            z = queue_tangent(k, q, tk, tq, zeros)
            dp = stream.queue(v, do, zeros) if DP else None
            stream.ahead(moving, ROWS, BLOCK_T, STAGES, LEAD, walk, count, i, batch)
            per_row.ahead(numbers, NUMBERS, BLOCK_T, STAGES, LEAD, walk, count, i, batch, T)
            per_row.arrive(numbers, STAGES, i)
            # Columns lie across a tile here and take many registers: each is fetched where it is needed.
            tail = tiles.load_optional_column(lse_tail, C.layout.lse_tail, batch, head, T, rows)
            x = tiles.capped(stream.arrived(x, TANGENTS + DP), C)
            mean = per_row.across(numbers, 0, stage, ACROSS)
            p = tiles.probabilities(x, log_sum, tail, bias, hidden, at, rows, columns, C, MASKED)
            z = stream.arrived(z, DP)
            if z is not None:
                z = z * C.scale
            a = centred(score_tangent(x, z, t_bias, at, rows, columns, C), mean)
            if g_value is not None:
                gv = stream.accumulate(p * a, do, gv, C.layout.value, C)
            if g_key is not None:
                row_delta = per_row.across(numbers, 1, stage, ACROSS)
                w = per_row.across(numbers, 2, stage, ACROSS)
                dp = None if mean is None else stream.arrived(dp, 0 if g_value is None else 1) - row_delta
                ds = None if mean is None else p * dp
                r = second_gradient(dp, a, w, zeros)
                if tv is not None:
                    # Onto what is there already: registers for one more tile there are not.
                    r = warpgroup_mma(tv, do.permute((1, 0)), r, is_async=True)
                if tq is not None:
                    gk = stream.accumulate(tiles.through_cap(ds, x, C), tq, gk, C.layout.key, C)
                if tv is not None:
                    r = stream.arrived(r, 0 if tq is None else 1)
                gk = stream.accumulate(second_through_cap(p * r, ds, x, z, C), q, gk, C.layout.key, C)
            gk, gv = stream.settled(gk, gv)
            stream.behind(moving, ROWS, BLOCK_T, STAGES, LEAD, walk, count, i, batch)
            per_row.behind(numbers, NUMBERS, BLOCK_T, STAGES, LEAD, walk, count, i, batch, T)

    if g_key is not None:
        stream.store_rows(g_key, C.layout.g_key, batch, kv_head, s0, S, BLOCK_S, gk * C.scale, C)
    if g_value is not None:
        stream.store_rows(g_value, C.layout.g_value, batch, kv_head, s0, S, BLOCK_S, gv, C)
