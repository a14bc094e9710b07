"""All that a kernel knows at compile time."""

from __future__ import annotations

import dataclasses

from jttt.spec import Band, Precision


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array of rows `[B, length, heads, width]` or a column `[B, heads, length]` is read.

    Attributes:
      heads, width: sizes of those axes (a column has width 1).
      batch: None for an array with the launch's whole batch. An operand that `jax.vmap` left
        unmapped lacks an axis and is read again for every index of it, in place: then, for each
        batch axis that it has, the (divisor, size, stride) that take the launch's batch index to
        its own.
    """

    heads: int
    width: int = 1
    batch: tuple[tuple[int, int, int], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work: rows of queries and of keys in a tile, warps in a program, and
    stages of the software pipeline that loads the streamed tiles."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayLayouts:
    """The layout of each array by its name, None for one that the kernel does not use."""

    query: Layout
    key: Layout
    value: Layout
    output: Layout
    lse: Layout
    d_output: Layout | None = None
    delta: Layout | None = None
    d_query: Layout | None = None
    d_key: Layout | None = None
    d_value: Layout | None = None
    t_query: Layout | None = None
    t_key: Layout | None = None
    t_value: Layout | None = None
    t_output: Layout | None = None
    t_lse: Layout | None = None
    row_term: Layout | None = None
    g_query: Layout | None = None
    g_key: Layout | None = None
    g_value: Layout | None = None


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The kernels' constexpr argument `C`."""

    scale: float
    band: Band
    precision: Precision
    blocks: Blocks
    layout: ArrayLayouts

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.layout.query.heads // self.layout.key.heads
