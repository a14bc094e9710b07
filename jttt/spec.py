"""The static half of an attention call: every choice that is fixed at trace time."""

from __future__ import annotations

import dataclasses
from typing import Literal

Implementation = Literal["triton", "xla"]
Precision = Literal["ieee", "tf32x3", "tf32"]


@dataclasses.dataclass(frozen=True)
class Band:
    """A rule on positions: query t sees key s if t - left <= s <= t + right.

    None means no limit on that side, so `Band(None, 0)` is the causal mask, aligned at the top
    left when the lengths differ.
    """

    left: int | None = None
    right: int | None = None

    @property
    def transposed(self) -> Band:
        """The same rule read from a key: key s is seen by query t if s - left <= t <= s + right."""
        return Band(self.right, self.left)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What the rules, the reference and the kernels need to know besides the arrays.

    Attributes:
      scale: factor on the scores before the softmax.
      band: which positions see each other.
      precision: how float32 products are made (half precision has only one way).
      implementation: what the caller asked for by name; None chooses by the platform that the
        computation is lowered for.
    """

    scale: float
    band: Band = Band()
    precision: Precision = "tf32x3"
    implementation: Implementation | None = None
