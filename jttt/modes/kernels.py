"""Triton kernels of the modes that store P, one for each pass of `plain.py`, and their launch.

Arrays are heads first, as in `plain.py`: one head is a contiguous matrix. A program has one block of
queries or of keys of one head and streams the blocks of the other axis that a causal mask leaves. A tile
of P is read once for each kernel; hidden tiles, which the forward fills with zeros, are never read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax_triton
import triton
import triton.language as tl

from jttt.kernels import interpreter
from jttt.spec import AttentionSpec, Precision

LOG2E = tl.constexpr(1.4426950408889634)


@dataclasses.dataclass(frozen=True)
class Config:
    """The kernels' constexpr argument `C`: blocks of `queries` and `keys`, and the widths H and E."""

    scale: float
    causal: bool
    precision: Precision
    queries: int
    keys: int
    H: int
    E: int


def run(name: str, spec: AttentionSpec, operands: dict[str, jax.Array], made: dict[str, jax.ShapeDtypeStruct],
        capability: int) -> dict[str, jax.Array]:
    """Runs the kernel of pass `name`; returns its outputs, whose shapes are `made`, by name."""
    kernel, arguments, outputs, programs, options = plan(name, spec, operands, made)
    if interpreter.has(kernel):
        return interpreter.run(kernel, (programs,), arguments, outputs)
    results = jax_triton.triton_call(
        **arguments, kernel=kernel, out_type=tuple(outputs.values()), grid=(programs,),
        name=f"jttt_modes_{kernel.__name__}", compute_capability=capability, **options)
    return dict(zip(outputs, results, strict=True))


def plan(name: str, spec: AttentionSpec, operands: dict[str, Any], made: dict[str, jax.ShapeDtypeStruct]
         ) -> tuple[Any, dict[str, Any], dict[str, jax.ShapeDtypeStruct], int, dict[str, int]]:
    """(kernel, arguments, outputs, programs, compiler's options) of a launch; needs only shapes and dtypes."""
    kernel, axis = KERNELS[name]
    arrays = operands | made
    heads, T, S = arrays["p"].shape
    widths = {array: arrays[array].shape[-1] for array in arrays if arrays[array].ndim == 3 and array != "p"}
    H = next((widths[array] for array in ("query", "key") if array in widths), 1)
    E = next((widths[array] for array in ("value", "d_output") if array in widths), 1)
    queries, keys, options = blocks(name, max(H, E), arrays["p"].dtype.itemsize)
    config = Config(spec.scale, spec.band.right is not None, spec.precision, queries, keys, H, E)
    arguments = {array: operands[array] for array in kernel.arg_names if array in operands}
    outputs = {array: made[array] for array in kernel.arg_names if array in made}
    count = triton.cdiv(T, queries) if axis == "queries" else triton.cdiv(S, keys)
    return kernel, arguments | {"T": T, "S": S, "C": config}, outputs, heads * count, options


def blocks(name: str, width: int, itemsize: int) -> tuple[int, int, dict[str, int]]:
    """(queries, keys, compiler's options): what fits the registers and shared memory of any GPU from 8.0 on."""
    size = 64 if width <= 128 else 32
    if itemsize == 4:
        size = 32 if width <= 64 else 16
    cut = dict(queries=size, keys=size)
    stages = 2
    if name in ("tangent", "g_query", "g_key_value"):  # They hold and stream twice as many tiles.
        stages = 2 if width <= 64 else 1
        if width > 64 or name == "g_key_value":
            cut["keys" if KERNELS[name][1] == "queries" else "queries"] = max(16, size // 2)
    return cut["queries"], cut["keys"], dict(num_warps=4 if width <= 64 else 8, num_stages=stages)


# Tiles


@triton.constexpr_function
def padded(width):
    """The width of a tile in registers: a power of two, and enough for a matrix instruction."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def program(blocks, LAST_FIRST: tl.constexpr):
    """This program's (block, head); LAST_FIRST starts each head with its last block, the longest."""
    block = tl.program_id(0) % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, (tl.program_id(0) // blocks).to(tl.int64)


@triton.jit
def row_pointers(array, head, start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    first = array + (head * length + start) * WIDTH
    return first + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, padded(WIDTH))[None, :]


@triton.jit
def rows_inside(start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    return (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, padded(WIDTH)) < WIDTH)[None, :]


@triton.jit
def load_rows(array, head, start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows start … start + ROWS of one head, zero past its length and its width."""
    pointers = row_pointers(array, head, start, length, WIDTH, ROWS)
    return tl.load(pointers, mask=rows_inside(start, length, WIDTH, ROWS), other=0.0)


@triton.jit
def store_rows(array, head, start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, tile):
    pointers = row_pointers(array, head, start, length, WIDTH, ROWS)
    tl.store(pointers, tile.to(array.dtype.element_ty), mask=rows_inside(start, length, WIDTH, ROWS))


@triton.jit
def load_column(array, head, length, rows):
    """A number for each of `rows`, in their shape, zero past `length`."""
    return tl.load(array + head * length + rows, mask=rows < length, other=0.0)


@triton.jit
def store_column(array, head, length, rows, values):
    tl.store(array + head * length + rows, values, mask=rows < length)


@triton.jit
def p_pointers(p, head, t0, s0, rows, columns, T, S):
    # 64 bits once for the tile, 32 within it: P may have more than 2³¹ elements.
    return p + ((head * T + t0) * S + s0) + ((rows - t0) * S + (columns - s0))


@triton.jit
def load_p(p, head, t0, s0, rows, columns, T, S):
    """A tile of P in float32, zero outside it: rows along the first axis, or transposed if they lie along
    the second."""
    pointers = p_pointers(p, head, t0, s0, rows, columns, T, S)
    return tl.load(pointers, mask=(rows < T) & (columns < S), other=0.0).to(tl.float32)


@triton.jit
def product(left, right, C: tl.constexpr, acc=None):
    """left · right, added to acc in float32; left is cast to right's dtype."""
    return tl.dot(left.to(right.dtype), right, acc, input_precision=C.precision)


@triton.jit
def key_blocks(t0, S, C: tl.constexpr):
    """How many blocks of keys the block of queries at t0 sees, from the first on."""
    end = tl.minimum(S, t0 + C.queries) if C.causal else S
    return tl.cdiv(end, C.keys)


@triton.jit
def first_query_block(s0, C: tl.constexpr):
    """The first block of queries that sees the block of keys at s0."""
    return s0 // C.queries if C.causal else s0 * 0


# Orders zero and one


@triton.jit
def forward_kernel(query, key, value, T, S, output, p, C: tl.constexpr):
    """Two sweeps: one for the peak and the sum of each row, one that writes P and multiplies by value what
    it wrote, rounded as it is."""
    block, head = program(tl.cdiv(T, C.queries), C.causal)
    t0 = block * C.queries
    rows = (t0 + tl.arange(0, C.queries))[:, None]
    q = load_rows(query, head, t0, T, C.H, C.queries)
    peak = tl.full([C.queries], float("-inf"), tl.float32)
    total = tl.zeros([C.queries], tl.float32)
    end = key_blocks(t0, S, C)
    for i in range(end):
        scores = scores_at(q, key, head, i * C.keys, rows, S, C)
        # Nobody's first block is hidden, so no peak is −∞ any longer.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
        peak = new_peak

    acc = tl.zeros([C.queries, padded(C.E)], tl.float32)
    for i in range(end):
        s0 = i * C.keys
        columns = (s0 + tl.arange(0, C.keys))[None, :]
        v = load_rows(value, head, s0, S, C.E, C.keys)
        tile = tl.exp2(scores_at(q, key, head, s0, rows, S, C) - peak[:, None]) / total[:, None]
        tile = tile.to(p.dtype.element_ty)
        tl.store(p_pointers(p, head, t0, s0, rows, columns, T, S), tile, mask=(rows < T) & (columns < S))
        acc = product(tile, v, C, acc)
    store_rows(output, head, t0, T, C.E, C.queries, acc)
    for i in range(end, tl.cdiv(S, C.keys)):
        columns = (i * C.keys + tl.arange(0, C.keys))[None, :]
        pointers = p_pointers(p, head, t0, i * C.keys, rows, columns, T, S)
        tl.store(pointers, tl.zeros([C.queries, C.keys], p.dtype.element_ty), mask=(rows < T) & (columns < S))


@triton.jit
def scores_at(q, key, head, s0, rows, S, C: tl.constexpr):
    """Scores in base two, −∞ where hidden."""
    columns = (s0 + tl.arange(0, C.keys))[None, :]
    scores = product(q, tl.trans(load_rows(key, head, s0, S, C.H, C.keys)), C) * (C.scale * LOG2E)
    seen = columns < S
    if C.causal:
        seen = seen & (columns <= rows)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def d_value_kernel(p, d_output, T, S, d_value, C: tl.constexpr):
    block, head = program(tl.cdiv(S, C.keys), False)
    s0 = block * C.keys
    columns = (s0 + tl.arange(0, C.keys))[:, None]
    dv = tl.zeros([C.keys, padded(C.E)], tl.float32)
    for i in range(first_query_block(s0, C), tl.cdiv(T, C.queries)):
        t0 = i * C.queries
        rows = (t0 + tl.arange(0, C.queries))[None, :]
        do = load_rows(d_output, head, t0, T, C.E, C.queries)
        dv = product(load_p(p, head, t0, s0, rows, columns, T, S), do, C, dv)
    store_rows(d_value, head, s0, S, C.E, C.keys, dv)


@triton.jit
def row_sum_kernel(value, p, d_output, T, S, delta, C: tl.constexpr):
    """The part of the softmax backward that needs whole rows."""
    block, head = program(tl.cdiv(T, C.queries), C.causal)
    t0 = block * C.queries
    rows = (t0 + tl.arange(0, C.queries))[:, None]
    do = load_rows(d_output, head, t0, T, C.E, C.queries)
    total = tl.zeros([C.queries], tl.float32)
    for i in range(key_blocks(t0, S, C)):
        s0 = i * C.keys
        columns = (s0 + tl.arange(0, C.keys))[None, :]
        dp = product(do, tl.trans(load_rows(value, head, s0, S, C.E, C.keys)), C)
        total += tl.sum(load_p(p, head, t0, s0, rows, columns, T, S) * dp, 1)
    store_column(delta, head, T, t0 + tl.arange(0, C.queries), total)


@triton.jit
def d_query_kernel(key, value, p, d_output, delta, T, S, d_query, C: tl.constexpr):
    block, head = program(tl.cdiv(T, C.queries), C.causal)
    t0 = block * C.queries
    rows = (t0 + tl.arange(0, C.queries))[:, None]
    do = load_rows(d_output, head, t0, T, C.E, C.queries)
    row_delta = load_column(delta, head, T, rows)
    dq = tl.zeros([C.queries, padded(C.H)], tl.float32)
    for i in range(key_blocks(t0, S, C)):
        s0 = i * C.keys
        columns = (s0 + tl.arange(0, C.keys))[None, :]
        dp = product(do, tl.trans(load_rows(value, head, s0, S, C.E, C.keys)), C)
        ds = load_p(p, head, t0, s0, rows, columns, T, S) * (dp - row_delta)
        dq = product(ds, load_rows(key, head, s0, S, C.H, C.keys), C, dq)
    store_rows(d_query, head, t0, T, C.H, C.queries, dq * C.scale)


@triton.jit
def d_key_kernel(query, value, p, d_output, delta, T, S, d_key, C: tl.constexpr):
    """Tiles are transposed here and in the other kernels that have a block of keys: keys along rows."""
    block, head = program(tl.cdiv(S, C.keys), False)
    s0 = block * C.keys
    columns = (s0 + tl.arange(0, C.keys))[:, None]
    v = load_rows(value, head, s0, S, C.E, C.keys)
    dk = tl.zeros([C.keys, padded(C.H)], tl.float32)
    for i in range(first_query_block(s0, C), tl.cdiv(T, C.queries)):
        t0 = i * C.queries
        rows = (t0 + tl.arange(0, C.queries))[None, :]
        dp = product(v, tl.trans(load_rows(d_output, head, t0, T, C.E, C.queries)), C)
        ds = load_p(p, head, t0, s0, rows, columns, T, S) * (dp - load_column(delta, head, T, rows))
        dk = product(ds, load_rows(query, head, t0, T, C.H, C.queries), C, dk)
    store_rows(d_key, head, s0, S, C.H, C.keys, dk * C.scale)


# Order two; names follow the design note.


@triton.jit
def tangent_kernel(query, key, value, output, p, d_output, t_query, t_key, t_value, T, S, mean, row_term,
                   t_output, C: tl.constexpr):
    block, head = program(tl.cdiv(T, C.queries), C.causal)
    t0 = block * C.queries
    rows = (t0 + tl.arange(0, C.queries))[:, None]
    q = load_rows(query, head, t0, T, C.H, C.queries)
    tq = load_rows(t_query, head, t0, T, C.H, C.queries)
    acc = tl.zeros([C.queries, padded(C.E)], tl.float32)
    total = tl.zeros([C.queries], tl.float32)
    for i in range(key_blocks(t0, S, C)):
        s0 = i * C.keys
        columns = (s0 + tl.arange(0, C.keys))[None, :]
        k = load_rows(key, head, s0, S, C.H, C.keys)
        tk = load_rows(t_key, head, s0, S, C.H, C.keys)
        v = load_rows(value, head, s0, S, C.E, C.keys)
        tv = load_rows(t_value, head, s0, S, C.E, C.keys)
        tile = load_p(p, head, t0, s0, rows, columns, T, S)
        a = product(q, tl.trans(tk), C, product(tq, tl.trans(k), C)) * C.scale
        # The row sum is of the rounded numbers that meet value: they cancel against it in t_output.
        pa = (tile * a).to(v.dtype)
        total += tl.sum(pa.to(tl.float32), 1)
        acc = product(pa, v, C, product(tile, tv, C, acc))
    o = load_rows(output, head, t0, T, C.E, C.queries).to(tl.float32)
    do = load_rows(d_output, head, t0, T, C.E, C.queries).to(tl.float32)
    acc -= total[:, None] * o
    positions = t0 + tl.arange(0, C.queries)
    store_rows(t_output, head, t0, T, C.E, C.queries, acc)
    store_column(mean, head, T, positions, total)
    store_column(row_term, head, T, positions, tl.sum(acc * do, 1))


@triton.jit
def score_gradients(p, a, dp, b, delta, mean, row_term):
    """(E, dS, R) of one tile; a is A, b is dO · t_valueᵀ."""
    centred, ds = a - mean, p * (dp - delta)
    return p * centred, ds, ds * centred + p * (b - row_term)


@triton.jit
def g_query_kernel(query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value, T, S, g_query,
                   C: tl.constexpr):
    block, head = program(tl.cdiv(T, C.queries), C.causal)
    t0 = block * C.queries
    rows = (t0 + tl.arange(0, C.queries))[:, None]
    q = load_rows(query, head, t0, T, C.H, C.queries)
    tq = load_rows(t_query, head, t0, T, C.H, C.queries)
    do = load_rows(d_output, head, t0, T, C.E, C.queries)
    row_delta = load_column(delta, head, T, rows)
    row_mean = load_column(mean, head, T, rows)
    w = load_column(row_term, head, T, rows)
    gq = tl.zeros([C.queries, padded(C.H)], tl.float32)
    for i in range(key_blocks(t0, S, C)):
        s0 = i * C.keys
        columns = (s0 + tl.arange(0, C.keys))[None, :]
        k = load_rows(key, head, s0, S, C.H, C.keys)
        tk = load_rows(t_key, head, s0, S, C.H, C.keys)
        a = product(q, tl.trans(tk), C, product(tq, tl.trans(k), C)) * C.scale
        dp = product(do, tl.trans(load_rows(value, head, s0, S, C.E, C.keys)), C)
        b = product(do, tl.trans(load_rows(t_value, head, s0, S, C.E, C.keys)), C)
        tile = load_p(p, head, t0, s0, rows, columns, T, S)
        e, ds, r = score_gradients(tile, a, dp, b, row_delta, row_mean, w)
        gq = product(ds, tk, C, product(r, k, C, gq))
    store_rows(g_query, head, t0, T, C.H, C.queries, gq * C.scale)


@triton.jit
def g_key_value_kernel(query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value, T, S, g_key,
                       g_value, C: tl.constexpr):
    block, head = program(tl.cdiv(S, C.keys), False)
    s0 = block * C.keys
    columns = (s0 + tl.arange(0, C.keys))[:, None]
    k = load_rows(key, head, s0, S, C.H, C.keys)
    tk = load_rows(t_key, head, s0, S, C.H, C.keys)
    v = load_rows(value, head, s0, S, C.E, C.keys)
    tv = load_rows(t_value, head, s0, S, C.E, C.keys)
    gk = tl.zeros([C.keys, padded(C.H)], tl.float32)
    gv = tl.zeros([C.keys, padded(C.E)], tl.float32)
    for i in range(first_query_block(s0, C), tl.cdiv(T, C.queries)):
        t0 = i * C.queries
        rows = (t0 + tl.arange(0, C.queries))[None, :]
        q = load_rows(query, head, t0, T, C.H, C.queries)
        tq = load_rows(t_query, head, t0, T, C.H, C.queries)
        do = load_rows(d_output, head, t0, T, C.E, C.queries)
        a = product(tk, tl.trans(q), C, product(k, tl.trans(tq), C)) * C.scale
        dp = product(v, tl.trans(do), C)
        b = product(tv, tl.trans(do), C)
        tile = load_p(p, head, t0, s0, rows, columns, T, S)
        e, ds, r = score_gradients(tile, a, dp, b, load_column(delta, head, T, rows),
                                   load_column(mean, head, T, rows), load_column(row_term, head, T, rows))
        gv = product(e, do, C, gv)
        gk = product(ds, tq, C, product(r, q, C, gk))
    store_rows(g_key, head, s0, S, C.H, C.keys, gk * C.scale)
    store_rows(g_value, head, s0, S, C.E, C.keys, gv)


# {pass: (kernel, what one program has a block of)}
KERNELS: dict[str, tuple[Any, str]] = {
    "forward": (forward_kernel, "queries"),
    "d_value": (d_value_kernel, "keys"),
    "row_sum": (row_sum_kernel, "queries"),
    "d_query": (d_query_kernel, "queries"),
    "d_key": (d_key_kernel, "keys"),
    "tangent": (tangent_kernel, "queries"),
    "g_query": (g_query_kernel, "queries"),
    "g_key_value": (g_key_value_kernel, "keys"),
}
