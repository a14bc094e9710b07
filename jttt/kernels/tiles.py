"""What every kernel is made of: finding a tile, loading it, masking it, recomputing P.

Arrays keep the layout of the public function. An array of rows is `[B, T, N, H]` (queries) or
`[B, S, K, H]` (keys), read in place: one head is rows of H contiguous numbers, N·H apart. A column
of per-row numbers (log-sum-exp, …) is `[B, N, T]`, a dense array (mask, bias) `[B, N, T, S]` with
any axis but B of size one. Each is told by a `config.Layout`.

`C`, a `config.KernelConfig`, holds all that is fixed at compile time. Lengths are run-time
arguments, so one compiled kernel serves every T and S. Rows are positions of queries and columns
positions of keys, shaped `[rows, 1]` and `[1, columns]`, or the other way round in a transposed
tile: what works on both only broadcasts.

Two tuples travel together: `at` says where a tile is, (batch, query head, T, S, first row, first
column); `hidden` holds the arrays that say what is visible, `masks.OPERANDS` without the summary.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def unit(C):
    """What scores and their log-sum-exp are multiplied by in registers. In base two an exponential is one
    instruction; but a bias may be near the largest float there is, and then they stay as they are."""
    return 1.4426950408889634 if C.layout.bias is None else 1.0


@triton.jit
def exponential(scores, C: tl.constexpr):
    """exp of a difference of scores."""
    return tl.exp2(scores * (LOG2E / unit(C)))


@triton.jit
def own_batch(batch, L: tl.constexpr):
    """Batch index within one array, 64 bit, from that of the launch."""
    index = batch.to(tl.int64)
    if L.batch is not None:
        index = index * 0
        for i in tl.static_range(len(L.batch)):
            index += (batch // L.batch[i][0]) % L.batch[i][1] * L.batch[i][2]
    if L.share_stride:
        index += tl.program_id(1).to(tl.int64) * L.share_stride
    return index


@triton.constexpr_function
def padded(width):
    """The width of a tile in registers: a power of two, and enough for a matrix instruction."""
    return max(16, triton.next_power_of_2(width))


# Rows


@triton.jit
def first_element(L: tl.constexpr, batch, head, start, length):
    """Where row `start` of one head begins. 64 bits, once for a tile: an array may have more than 2³¹ elements."""
    return ((own_batch(batch, L) * length + start) * L.heads + head) * L.width


@triton.jit
def row_pointers(array, L: tl.constexpr, batch, head, start, length, ROWS: tl.constexpr):
    first = array + first_element(L, batch, head, start, length)
    return first + (tl.arange(0, ROWS)[:, None] * (L.heads * L.width) + tl.arange(0, padded(L.width))[None, :])


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


# Columns


@triton.jit
def column_pointers(array, L: tl.constexpr, batch, head, length, rows):
    return array + (own_batch(batch, L) * L.heads + head) * length + rows


@triton.jit
def load_column(array, L: tl.constexpr, batch, head, length, rows):
    """A per-row quantity at `rows`, in their shape, zero past `length`."""
    return tl.load(column_pointers(array, L, batch, head, length, rows), mask=rows < length, other=0.0)


@triton.jit
def load_optional_column(array, L: tl.constexpr, batch, head, length, rows):
    """The same, or None for an array that is absent."""
    if array is None:
        return None
    else:
        return load_column(array, L, batch, head, length, rows)


@triton.jit
def load_lse(array, L: tl.constexpr, batch, head, length, rows, C: tl.constexpr):
    """Log-sum-exp as `probabilities` takes it, +∞ also for a row past `length`."""
    lse = tl.load(column_pointers(array, L, batch, head, length, rows), mask=rows < length, other=float("-inf"))
    return subtrahend(lse, C)


@triton.jit
def subtrahend(lse, C: tl.constexpr):
    """Log-sum-exp in the unit of the exponentials; +∞ for a row that sees nothing: P is then 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * unit(C))


@triton.jit
def store_column(array, L: tl.constexpr, batch, head, length, rows, values):
    tl.store(column_pointers(array, L, batch, head, length, rows), values, mask=rows < length)


# Dense arrays


@triton.jit
def dense_pointers(array, L: tl.constexpr, batch, head, t0, s0, rows, columns, T, S):
    # As in row_pointers, 64 bits once for the tile that begins at (t0, s0).
    first = own_batch(batch, L) * L.heads
    offset = rows * 0
    if L.heads > 1:
        first += head
    if L.rows:
        first = first * T + t0
        offset = rows - t0
    if L.columns:
        first = first * S + s0
        offset = (offset * S if L.rows else 0) + (columns - s0)
    return array + first + offset


@triton.jit
def load_dense(array, L: tl.constexpr, at, rows, columns):
    """A tile of a dense array, zero outside it; size one along the axes along which it is broadcast."""
    batch, head, T, S, t0, s0 = at
    pointers = dense_pointers(array, L, batch, head, t0, s0, rows, columns, T, S)
    if L.rows and L.columns:
        return tl.load(pointers, mask=(rows < T) & (columns < S), other=0)
    elif L.rows:
        return tl.load(pointers, mask=rows < T, other=0)
    elif L.columns:
        return tl.load(pointers, mask=columns < S, other=0)
    else:
        return tl.load(pointers)


# Scores and probabilities


@triton.jit
def product(left, right, C: tl.constexpr, acc=None):
    """left · right, added to acc in float32; left is cast to right's dtype."""
    return tl.dot(left.to(right.dtype), right, acc, input_precision=C.precision)


@triton.jit
def capped(products, C: tl.constexpr):
    """What the functions below call `x`: the raw products q·k, or tanh(scale · q·k / cap)."""
    if C.soft_cap is not None:
        # tanh, without a branch and without overflow.
        return 1 - 2 / (tl.exp2(products * (2 * LOG2E * C.scale / C.soft_cap)) + 1)
    else:
        return products


@triton.jit
def scores(x, bias, at, rows, columns, C: tl.constexpr):
    """Scores: the scaled and capped products, and the bias."""
    s = x * ((C.scale if C.soft_cap is None else C.soft_cap) * unit(C))
    if bias is not None:
        s += load_dense(bias, C.layout.bias, at, rows, columns).to(tl.float32)
    return s


@triton.jit
def probabilities(x, lse, tail, bias, hidden, at, rows, columns, C: tl.constexpr, MASKED: tl.constexpr):
    """P from the log-sum-exp and what rounding took off it (None: nothing that matters); exactly 0 where
    masked, whatever the products hold."""
    difference = scores(x, bias, at, rows, columns, C) - lse
    if tail is not None:
        difference -= tail
    p = exponential(difference, C)
    if MASKED:
        p = tl.where(visible(hidden, at, rows, columns, C), p, 0.0)
    return p


@triton.jit
def softmax_step(x, peak, total, bias, hidden, at, rows, columns, C: tl.constexpr, MASKED: tl.constexpr):
    """One tile of online softmax: (P relative to the new peak, what earlier tiles shrink by, peak, total).

    Peaks are in units of `softmax_unit`.
    """
    if folds_scale(C):
        y = x
    else:
        y = scores(x, bias, at, rows, columns, C)
    if MASKED:
        y = tl.where(visible(hidden, at, rows, columns, C), y, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(y, 1))
    # A row that has seen nothing yet has peak −∞, and −∞ − −∞ is NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak * softmax_unit(C))
    p = exponential(y * softmax_unit(C) - shift[:, None], C)
    decay = exponential(peak * softmax_unit(C) - shift, C)
    return p, decay, new_peak, total * decay + tl.sum(p, 1)


@triton.constexpr_function
def folds_scale(C):
    """Whether the largest score is that of the largest product: then one multiply-add takes a product to its
    exponent."""
    return C.layout.bias is None and C.layout.sinks is None and C.soft_cap is None and C.scale > 0


@triton.constexpr_function
def softmax_unit(C):
    """What peaks are multiplied by to be scores in the unit of `unit`."""
    return C.scale * unit(C) if folds_scale(C) else 1.0


@triton.jit
def first_peak(sinks, batch, head, C: tl.constexpr):
    """Peak and total of a row that has seen nothing but its sink."""
    if sinks is None:
        return float("-inf"), 0.0
    else:
        sink = load_column(sinks, C.layout.sinks, batch, head, 1, 0).to(tl.float32) * (unit(C) / softmax_unit(C))
        return sink, tl.where(sink == float("-inf"), 0.0, 1.0)


@triton.jit
def log_sum_exp(peak, total, C: tl.constexpr):
    """(lse, lse_tail) of rows from their peaks and totals; −∞ and 0 where total is 0."""
    empty = total == 0
    peak = tl.where(empty, 0.0, peak) * softmax_unit(C)
    log_total = tl.log2(tl.where(empty, 1.0, total)) * (LN2 * unit(C))
    log_sum = tl.where(empty, float("-inf"), (peak + log_total) * (1 / unit(C)))
    return log_sum, tl.where(empty, 0.0, (peak - log_sum) + log_total)


@triton.jit
def through_cap(tile, x, C: tl.constexpr):
    """A gradient of capped scores as one of scaled products, or a tangent the other way."""
    if C.soft_cap is not None:
        return tile * (1 - x * x)
    else:
        return tile


# Visibility


@triton.jit
def visible(hidden, at, rows, columns, C: tl.constexpr):
    """Whether the query at `rows` sees the key at `columns`; see `jttt/masks.py`."""
    key_start, key_end, query_segments, key_segments, mask = hidden
    batch, head, T, S, t0, s0 = at
    seen = columns < S
    if C.band.left is not None:
        seen = seen & (columns >= rows - C.band.left)
    if C.band.right is not None:
        seen = seen & (columns <= rows + C.band.right)
    if key_start is not None:
        seen = seen & (columns >= load_column(key_start, C.layout.key_start, batch, 0, T, rows))
        seen = seen & (columns < load_column(key_end, C.layout.key_end, batch, 0, T, rows))
    if query_segments is not None:
        segment = load_column(query_segments, C.layout.query_segments, batch, 0, T, rows)
        seen = seen & (segment >= 0)
        seen = seen & (segment == load_column(key_segments, C.layout.key_segments, batch, 0, S, columns))
    if mask is not None:
        seen = seen & (load_dense(mask, C.layout.mask, at, rows, columns) != 0)
    return seen


# Gradients of a bias


@triton.jit
def store_bias(array, L: tl.constexpr, row_block, column_block, head, batch, T, S, tile, C: tl.constexpr):
    """Writes a tile of a gradient of the bias, summed along the axes along which that is broadcast."""
    t0 = row_block * C.blocks.queries
    s0 = column_block * C.blocks.keys
    rows = (t0 + tl.arange(0, C.blocks.queries))[:, None]
    columns = (s0 + tl.arange(0, C.blocks.keys))[None, :]
    if not L.rows:
        tile = tl.sum(tile, 0, keep_dims=True)
        rows = tl.zeros([1, 1], tl.int32)
    if not L.columns:
        tile = tl.sum(tile, 1, keep_dims=True)
        columns = tl.zeros([1, 1], tl.int32)
    pointers = dense_pointers(array, L, batch * C.bias_batch, head, t0, s0, rows, columns, T, S)
    pointers = pointers + tl.zeros(tile.shape, tl.int32)
    tl.store(pointers, tile.to(array.dtype.element_ty), mask=(rows < T) & (columns < S))
