"""What every kernel is made of: finding a tile, loading it, masking it, recomputing P.

Arrays keep the layout of the public function. An array of rows is `[B, T, N, H]` (queries) or
`[B, S, K, H]` (keys), read in place: one head is rows of H contiguous numbers, N·H apart. A column
of per-row numbers (log-sum-exp, …) is `[B, N, T]`. Both are told by a `config.Layout`.

`C`, a `config.KernelConfig`, holds all that is fixed at compile time. Lengths are run-time
arguments, so one compiled kernel serves every T and S.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program(blocks, HEADS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's (block, head, batch). Blocks of one head are neighbours, so they share what
    they stream through the L2 cache; LAST_FIRST starts each head with its last block."""
    index = tl.program_id(0)
    block = index % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    head = (index // blocks) % HEADS
    batch = (index // blocks) // HEADS
    return block, head, batch


@triton.jit
def operand_batch(batch, AXES: tl.constexpr):
    """Batch index within one operand, 64 bit, from that of the launch. AXES is None for an operand
    with the launch's whole batch, else the (divisor, size, stride) of each batch axis it has."""
    index = batch.to(tl.int64)
    if AXES is not None:
        index = index * 0
        for i in tl.static_range(len(AXES)):
            index += (batch // AXES[i][0]) % AXES[i][1] * AXES[i][2]
    return index


@triton.jit
def load_rows(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Rows start … start + ROWS of one head, zero past `length` (looked at only if CHECKED) and in
    the columns that pad the width to a power of two. None for an array that is absent."""
    if array is None:
        return None
    else:
        pointers = row_pointers(array, L, batch, head, start, length, ROWS)
        columns = tl.arange(0, padded(L.width))
        if CHECKED:
            inside = (start + tl.arange(0, ROWS) < length)[:, None]
            if padded(L.width) != L.width:
                inside = inside & (columns < L.width)[None, :]
            return tl.load(pointers, mask=inside, other=0.0)
        elif padded(L.width) != L.width:
            return tl.load(pointers, mask=(columns < L.width)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_rows(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr, tile):
    """Writes the part of a tile that lies within `length` and the width, in the array's dtype."""
    pointers = row_pointers(array, L, batch, head, start, length, ROWS)
    inside = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, padded(L.width)) < L.width)[None, :]
    tl.store(pointers, tile.to(array.dtype.element_ty), mask=inside)


@triton.jit
def row_pointers(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr):
    # 64 bits once for the tile, 32 within it: an array may have more than 2³¹ elements.
    row = operand_batch(batch, L.batch) * length + start
    first = array + (row * L.heads + head) * L.width
    return first + (tl.arange(0, ROWS)[:, None] * (L.heads * L.width) + tl.arange(0, padded(L.width))[None, :])


@triton.constexpr_function
def padded(width):
    """The width of a tile in registers: a power of two, and enough for a matrix instruction."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def load_column(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr):
    """A per-row quantity for rows start … start + ROWS, zero past `length`."""
    rows = start + tl.arange(0, ROWS)
    return tl.load(column_pointers(array, L, batch, head, length, rows), mask=rows < length, other=0.0)


@triton.jit
def load_lse(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr):
    """Log-sum-exp in base two, +∞ for a row that sees nothing or lies past `length`: P is then 0."""
    rows = start + tl.arange(0, ROWS)
    lse = tl.load(column_pointers(array, L, batch, head, length, rows), mask=rows < length, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def store_column(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr, values):
    rows = start + tl.arange(0, ROWS)
    tl.store(column_pointers(array, L, batch, head, length, rows), values, mask=rows < length)


@triton.jit
def column_pointers(array, L: tl.constexpr, batch, head, length, rows):
    return array + (operand_batch(batch, L.batch) * L.heads + head) * length + rows


@triton.jit
def product(left, right, C: tl.constexpr, acc=None):
    """left · right, added to acc in float32; left is cast to right's dtype."""
    return tl.dot(left.to(right.dtype), right, acc, input_precision=C.precision)


@triton.jit
def probabilities(scores, lse, rows, columns, keys, C: tl.constexpr, MASKED: tl.constexpr):
    """P from raw products q·k and the base-two log-sum-exp; exactly 0 where masked, whatever the
    products hold. Rows (queries) and columns (keys) are positions, shaped to broadcast either way
    round."""
    p = tl.exp2(scores * (C.scale * LOG2E) - lse)
    if MASKED:
        p = tl.where(visible(rows, columns, keys, C), p, 0.0)
    return p


@triton.jit
def visible(rows, columns, keys, C: tl.constexpr):
    """Whether the query at position `rows` sees the key at position `columns`."""
    seen = columns < keys
    if C.band.left is not None:
        seen = seen & (columns >= rows - C.band.left)
    if C.band.right is not None:
        seen = seen & (columns <= rows + C.band.right)
    return seen


@triton.jit
def block_bounds(first, last, length, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of the other axis that positions first … last meet: (begin, full_begin, full_end, end).

    Position p meets p - LEFT … p + RIGHT. Blocks outside [begin, end) are hidden from every
    position, blocks in [full_begin, full_end) are visible to all of them and whole.
    """
    begin = first * 0
    full_begin = begin
    end = tl.cdiv(length, BLOCK)
    full_end = length // BLOCK
    if LEFT is not None:
        begin = tl.minimum(tl.maximum(first - LEFT, 0) // BLOCK, end)
        full_begin = tl.cdiv(tl.maximum(last - LEFT, 0), BLOCK)
    if RIGHT is not None:
        end = tl.maximum(begin, tl.minimum(end, tl.cdiv(tl.maximum(last + RIGHT + 1, 0), BLOCK)))
        full_end = tl.minimum(full_end, tl.maximum(first + RIGHT + 1, 0) // BLOCK)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def block_count(begin, full_begin, full_end, end, MASKED: tl.constexpr):
    """How many blocks need a mask, or how many need none."""
    return (full_begin - begin) + (end - full_end) if MASKED else full_end - full_begin


@triton.jit
def block_at(i, begin, full_begin, full_end, MASKED: tl.constexpr):
    """The i-th block that needs a mask (those before the full ones, then those after), or none."""
    if MASKED:
        before = full_begin - begin
        return tl.where(i < before, begin + i, full_end + i - before)
    else:
        return full_begin + i
