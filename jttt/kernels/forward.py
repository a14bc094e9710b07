"""Order zero: output and log-sum-exp by online softmax, one block of queries a program."""

import triton
import triton.language as tl

from jttt.kernels import tiles


@triton.jit
def forward_kernel(query, key, value, T, S, output, lse, C: tl.constexpr):
    BLOCK_T: tl.constexpr = C.blocks.queries
    BLOCK_S: tl.constexpr = C.blocks.keys
    block, head, batch = tiles.program(tl.cdiv(T, BLOCK_T), C.layout.query.heads, C.band.right is not None)
    kv_head = head // C.group
    start = block * BLOCK_T

    q = tiles.load_rows(query, C.layout.query, batch, head, start, T, BLOCK_T, True)
    rows = (start + tl.arange(0, BLOCK_T))[:, None]
    peak = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, tiles.padded(C.layout.value.width)], tl.float32)

    begin, full_begin, full_end, end = tiles.block_bounds(
        start, tl.minimum(start + BLOCK_T, T) - 1, S, C.band.left, C.band.right, BLOCK_S)
    for MASKED in tl.static_range(2):
        for i in range(tiles.block_count(begin, full_begin, full_end, end, MASKED)):
            key_start = tiles.block_at(i, begin, full_begin, full_end, MASKED) * BLOCK_S
            k = tiles.load_rows(key, C.layout.key, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            v = tiles.load_rows(value, C.layout.value, batch, kv_head, key_start, S, BLOCK_S, MASKED)
            scores = tiles.product(q, tl.trans(k), C) * (C.scale * tiles.LOG2E)
            if MASKED:
                columns = (key_start + tl.arange(0, BLOCK_S))[None, :]
                scores = tl.where(tiles.visible(rows, columns, S, C), scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen nothing yet has peak −∞, and −∞ − −∞ is NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(peak - shift)
            total = total * decay + tl.sum(p, 1)
            acc = tiles.product(p, v, C, acc * decay[:, None])
            peak = new_peak

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    tiles.store_rows(output, C.layout.output, batch, head, start, T, BLOCK_T, acc / total[:, None])
    lse_rows = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * tiles.LN2)
    tiles.store_column(lse, C.layout.lse, batch, head, start, T, BLOCK_T, lse_rows)
