"""The tile code that all kernels share, where whole kernels cannot show it."""

import numpy as np
import pytest
import triton
import triton.language as tl

from jttt.kernels import tiles
from jttt.kernels.config import Layout
from jttt.kernels.interpreter import HostTensor

ROWS = 16


@triton.jit
def offsets_kernel(array, dense, rows_out, dense_out, batch, start, T, S, L: tl.constexpr, D: tl.constexpr):
    rows = (start + tl.arange(0, ROWS))[:, None]
    columns = (start + tl.arange(0, ROWS))[None, :]
    at = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    of_rows = tiles.row_pointers(array, L, batch, 3, start, T, ROWS)
    of_dense = tiles.dense_pointers(dense, D, batch, 3, start, start, rows, columns, T, S)
    tl.store(rows_out + at, of_rows.to(tl.int64) - array.to(tl.int64))
    tl.store(dense_out + at, of_dense.to(tl.int64) - dense.to(tl.int64))


@pytest.mark.skipif(isinstance(offsets_kernel, triton.JITFunction), reason="runs in Triton's interpreter")
def test_offsets_are_exact_past_32_bits():
    T, S, heads, width, batch, start = 2**21, 2**20 + 7, 16, 16, 2, 2**20
    array, dense = np.zeros(1, np.float16), np.zeros(1, np.float16)
    of_rows, of_dense = np.zeros((ROWS, ROWS), np.int64), np.zeros((ROWS, ROWS), np.int64)
    tensors = [HostTensor(x) for x in (array, dense, of_rows, of_dense)]
    offsets_kernel[(1,)](*tensors, batch, start, T, S, L=Layout(heads, width), D=Layout(heads))

    row, column = start + np.arange(ROWS)[:, None], np.arange(ROWS)[None, :]
    expected = ((batch * T + row) * heads + 3) * width + column
    assert expected.min() * 2 > 2**31
    np.testing.assert_array_equal(of_rows, expected * array.itemsize)
    np.testing.assert_array_equal(of_dense, (((batch * heads + 3) * T + row) * S + start + column) * dense.itemsize)
