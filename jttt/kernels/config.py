"""All that a kernel knows at compile time."""

from __future__ import annotations

import dataclasses

from jttt.spec import Band, Precision


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array is read: rows `[B, length, heads, width]`, a column `[B, heads, length]`, or a
    dense array `[B, heads, T, S]`.

    Attributes:
      heads: size of that axis; one in a dense array that all heads share.
      width: numbers in a row.
      rows, columns: whether a dense array has those axes, or one entry along them.
      batch: None for an array with the launch's whole batch. An operand that `jax.vmap` left
        unmapped, or that the batch shares, lacks an axis and is read again for every index of it,
        in place: then, for each batch axis that it has, the (divisor, size, stride) that take the
        launch's batch index to its own.
      share_stride: for an output that every share of a block's work has an entry of, along a new first
        axis: the launch's batch; else zero.
    """

    heads: int
    width: int = 1
    rows: bool = True
    columns: bool = True
    batch: tuple[tuple[int, int, int], ...] | None = None
    share_stride: int = 0


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work: rows of queries and of keys in a tile, warps in a program, and
    stages of the software pipeline that loads the streamed tiles. `most_registers` of a thread, if given, lets
    more programs share a multiprocessor than the compiler would. `spilled` is how many bytes of registers a
    thread may spill when compiled so."""

    queries: int
    keys: int
    warps: int
    stages: int
    spilled: int = 0
    most_registers: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayLayouts:
    """The layout of each array by its name, None for one that the kernel does not use."""

    query: Layout
    key: Layout
    value: Layout
    bias: Layout | None = None
    sinks: Layout | None = None
    key_start: Layout | None = None
    key_end: Layout | None = None
    query_segments: Layout | None = None
    key_segments: Layout | None = None
    mask: Layout | None = None
    block_list: Layout | None = None
    block_counts: Layout | None = None
    tile_status: Layout | None = None
    output: Layout | None = None
    lse: Layout | None = None
    lse_tail: Layout | None = None
    d_output: Layout | None = None
    delta: Layout | None = None
    d_query: Layout | None = None
    d_key: Layout | None = None
    d_value: Layout | None = None
    d_bias: Layout | None = None
    t_query: Layout | None = None
    t_key: Layout | None = None
    t_value: Layout | None = None
    t_bias: Layout | None = None
    t_sinks: Layout | None = None
    t_output: Layout | None = None
    t_lse: Layout | None = None
    row_term: Layout | None = None
    g_query: Layout | None = None
    g_key: Layout | None = None
    g_value: Layout | None = None
    g_bias: Layout | None = None


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The kernels' constexpr argument `C`."""

    scale: float
    band: Band
    soft_cap: float | None
    precision: Precision
    blocks: Blocks
    layout: ArrayLayouts
    # How many entries of the launch's batch share one of the bias.
    bias_batch: int = 1
    # How many programs share the work of one block.
    shares: int = 1

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.layout.query.heads // self.layout.key.heads
