"""Order zero on Hopper: the softmax of one tile runs beside the product that makes the scores of the next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from jttt.kernels import schedule, tiles
from jttt.kernels.hopper import stream


@gluon.jit
def forward_hopper(query, key, value, bias, sinks, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, T, S, output, lse, lse_tail, C: gl.constexpr):
    BLOCK_T: gl.constexpr = C.blocks.queries
    BLOCK_S: gl.constexpr = C.blocks.keys
    STAGES: gl.constexpr = C.blocks.stages
    LEAD: gl.constexpr = STAGES
    WIDTH: gl.constexpr = tiles.padded(C.layout.value.width)
    TILE: gl.constexpr = stream.accumulator(BLOCK_S, C)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    OUTPUT: gl.constexpr = stream.accumulator(WIDTH, C)
    Q: gl.constexpr = stream.layouts(C, "query")
    K: gl.constexpr = stream.layouts(C, "key")
    V: gl.constexpr = stream.layouts(C, "value")
    head, batch, t0, walk, full, count = stream.queries_at(T, S, block_list, block_counts, C)
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    rows = (t0 + gl.arange(0, BLOCK_T, ROW))[:, None]

    queries = stream.make((query, ), Q, BLOCK_T, 1)
    keys = stream.make((key, ), K, BLOCK_S, STAGES)
    values = stream.make((value, ), V, BLOCK_S, STAGES)
    stream.publish()
    stream.fetch(queries, Q, BLOCK_T, batch, head, t0)
    stream.start(keys, K, BLOCK_S, STAGES, LEAD, walk, count, batch)
    stream.start(values, V, BLOCK_S, STAGES, LEAD, walk, count, batch)

    sink, one = tiles.first_peak(sinks, batch, head, C)
    peak = gl.zeros([BLOCK_T], gl.float32, ROW) + sink
    total = gl.zeros([BLOCK_T], gl.float32, ROW) + one
    acc = gl.zeros([BLOCK_T, WIDTH], gl.float32, OUTPUT)
    zeros = gl.zeros([BLOCK_T, BLOCK_S], gl.float32, TILE)
    stream.wait(queries, 0, 1, True)
    q = stream.matrix(queries, 0, 0, Q, BLOCK_T).load(stream.left_operand(BLOCK_S, C))

    # Products of the first tile; where there is none, of whatever lies there, and nobody looks at them.
    stream.wait(keys, 0, STAGES, count > 0)
    stream.arm(keys, K, BLOCK_S, 0, STAGES < count)
    k = stream.matrix(keys, 0, 0, K, BLOCK_S)
    x = warpgroup_mma_wait(0, deps=[warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)])
    stream.behind(keys, K, BLOCK_S, STAGES, LEAD, walk, count, 0, batch)

    # Tiles that are wholly visible, tiles that need a mask, and the last one, behind which nothing is queued.
    last = gl.maximum(count - 1, 0)
    for PART in gl.static_range(3):
        begin = 0 if PART == 0 else (gl.minimum(full, last) if PART == 1 else last)
        end = gl.minimum(full, last) if PART == 0 else (last if PART == 1 else count)
        for i in range(begin, end):
            key_block, _ = schedule.visited(walk, i)
            s0 = key_block * BLOCK_S
            at = (batch, head, T, S, t0, s0)
            columns = (s0 + gl.arange(0, BLOCK_S, gl.SliceLayout(0, TILE)))[None, :]
            v_stage = stream.arrive(values, V, BLOCK_S, STAGES, LEAD, count, i)
            if PART != 2:
                k_stage = stream.arrive(keys, K, BLOCK_S, STAGES, LEAD, count, i + 1)
                k = stream.matrix(keys, 0, k_stage, K, BLOCK_S)
                next_x = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            p, decay, peak, total = tiles.softmax_step(tiles.capped(x, C), peak, total, bias, hidden, at, rows, columns,
                                                       C, PART != 0)
            p = gl.convert_layout(p.to(value.dtype), stream.left_operand(WIDTH, C))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))[:, None]
            next_acc = warpgroup_mma(p, stream.matrix(values, 0, v_stage, V, BLOCK_S), acc, is_async=True)
            if PART == 2:
                acc = warpgroup_mma_wait(0, deps=[next_acc])
            else:
                x, acc = warpgroup_mma_wait(0, deps=[next_x, next_acc])
                stream.behind(values, V, BLOCK_S, STAGES, LEAD, walk, count, i, batch)
                stream.behind(keys, K, BLOCK_S, STAGES, LEAD, walk, count, i + 1, batch)

    norm = gl.convert_layout(gl.where(total == 0, 1.0, total), gl.SliceLayout(1, OUTPUT))
    stream.store_rows(output, C.layout.output, batch, head, t0, T, BLOCK_T, acc / norm[:, None], C)
    log_sum, tail = tiles.log_sum_exp(peak, total, C)
    column = t0 + gl.arange(0, BLOCK_T, ROW)
    tiles.store_column(lse, C.layout.lse, batch, head, T, column, log_sum)
    if lse_tail is not None:
        tiles.store_column(lse_tail, C.layout.lse_tail, batch, head, T, column, tail)
