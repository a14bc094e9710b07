"""Order zero: output and log-sum-exp by online softmax, one block of queries a program."""

import triton
import triton.language as tl

from jttt.kernels import schedule, tiles


@triton.jit
def forward_kernel(query, key, value, bias, sinks, key_start, key_end, query_segments, key_segments, mask,
                   block_list, block_counts, T, S, output, lse, lse_tail, C: tl.constexpr):
    """lse_tail is None where there is no bias: with one, scores may be too large for lse to hold."""
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = schedule.query_program(T, S, C)
    kv_head = head // C.group
    hidden = (key_start, key_end, query_segments, key_segments, mask)
    t0 = block * BLOCK_T
    rows = (t0 + tl.arange(0, BLOCK_T))[:, None]
    q = tiles.load_rows(query, C.layout.query, batch, head, t0, T, BLOCK_T, True)
    acc = tl.zeros([BLOCK_T, tiles.padded(C.layout.value.width)], tl.float32)
    sink, one = tiles.first_peak(sinks, batch, head, C)
    peak = tl.zeros([BLOCK_T], tl.float32) + sink
    total = tl.zeros([BLOCK_T], tl.float32) + one

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
            p, decay, peak, total = tiles.softmax_step(x, peak, total, bias, hidden, at, rows, columns, C, MASKED)
            acc = tiles.product(p, v, C, acc * decay[:, None])

    norm = tl.where(total == 0, 1.0, total)
    tiles.store_rows(output, C.layout.output, batch, head, t0, T, BLOCK_T, acc / norm[:, None])
    log_sum, tail = tiles.log_sum_exp(peak, total, C)
    tiles.store_column(lse, C.layout.lse, batch, head, T, t0 + tl.arange(0, BLOCK_T), log_sum)
    if lse_tail is not None:
        tiles.store_column(lse_tail, C.layout.lse_tail, batch, head, T, t0 + tl.arange(0, BLOCK_T), tail)
