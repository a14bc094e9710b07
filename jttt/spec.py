"""The static half of an attention call: every choice that is fixed at trace time."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

Implementation = Literal["triton", "xla"]
Precision = Literal["ieee", "tf32x3", "tf32"]
SequenceLayout = Literal["contiguous", "zigzag"]

# What `jax.default_matmul_precision` asks for; anything else keeps float32 products accurate.
_PRECISIONS: dict[str | None, Precision] = {
    "tensorfloat32": "tf32", "bfloat16": "tf32", "float32": "ieee", "highest": "ieee",
}


def default_precision() -> Precision:
    """How float32 products are made in the current `jax.default_matmul_precision`."""
    return _PRECISIONS.get(jax.config.jax_default_matmul_precision, "tf32x3")


@dataclasses.dataclass(frozen=True)
class Band:
    """A rule on positions: query t sees key s if t - left <= s <= t + right.

    None means no limit on that side, so `Band(None, 0)` is the causal mask, aligned at the top
    left when the lengths differ. Either limit may be negative.
    """

    left: int | None = None
    right: int | None = None

    @property
    def slanted(self) -> bool:
        """Whether queries see the more, or the less, the later they stand: one side is open, the other is not."""
        return (self.left is None) != (self.right is None)

    def __and__(self, other: Band) -> Band:
        lefts = [band.left for band in (self, other) if band.left is not None]
        rights = [band.right for band in (self, other) if band.right is not None]
        return Band(min(lefts, default=None), min(rights, default=None))

    def shifted(self, offset: int, limit: int) -> Band:
        """The rule for queries that stand at position t + offset, clipped to ±limit: distances beyond it do
        not occur, and could overflow int32."""
        left = None if self.left is None else max(-limit, min(self.left - offset, limit))
        right = None if self.right is None else max(-limit, min(self.right + offset, limit))
        return Band(left, right)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices along a mesh axis of a `jax.shard_map` that each hold a part of a sequence.

    Attributes:
      axis_name: of the mesh axis.
      devices: how many there are.
      layout: which part device i has: the i-th of equal slices, or slices i and 2·devices − 1 − i of twice as many,
        so that all of them have as much to do under a causal mask.
    """

    axis_name: str
    devices: int
    layout: SequenceLayout


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What the rules, the reference and the kernels need to know besides the arrays.

    Attributes:
      scale: factor on the products of queries and keys.
      band: which positions see each other.
      soft_cap: if given, a scaled product z becomes soft_cap · tanh(z / soft_cap).
      precision: how float32 products are made (half precision has only one way).
      implementation: what the caller asked for by name; None chooses by the platform that the
        computation is lowered for.
      partial: whether results are parts of sums, which stay in the accumulator's dtype.
      ring: the devices among which the keys go round; key_start and key_end are then positions in the whole sequence.
    """

    scale: float
    band: Band = Band()
    soft_cap: float | None = None
    precision: Precision = "tf32x3"
    implementation: Implementation | None = None
    partial: bool = False
    ring: Ring | None = None


# Arrays with a number for each position of a sequence, the same for all heads.
PER_POSITION = ("key_start", "key_end", "query_segments", "key_segments")


def kind(array: str) -> str:
    """query of t_query, d_query and g_query, and so on: the name that tells an array's axes."""
    return array[2:] if array[:2] in ("d_", "t_", "g_") else array
