"""A spot check: the gradient of the gradient runs and is finite, in every mode, dtype and mask.

    python tests/test_gradgrad.py        # the same without pytest, one line each
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

if __name__ == "__main__":  # A checkout need not be installed.
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import pytest

import jttt.modes
from jttt import passes

DTYPES = ("float32", "float16", "bfloat16")
CASES = list(itertools.product(jttt.modes.BWD_MODES, DTYPES, (False, True)))


def implementation(dtype: str) -> str | None:
    """Kernels wherever there is something that runs them; Triton's interpreter has no bfloat16."""
    return "triton" if passes.interprets_triton() and dtype != "bfloat16" else None


def meta_gradient(mode: str, dtype: str, is_causal: bool) -> tuple[jax.Array, ...]:
    """grad(Σ g²) for g = grad(Σ attention²), of normal inputs, two heads of 16 and 40 tokens."""
    arrays = [jax.random.normal(key, (1, 40, 2, 16)).astype(dtype) for key in jax.random.split(jax.random.key(0), 3)]

    def squares(x):
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def loss(*arrays):
        return squares(jttt.modes.dot_product_attention(
            *arrays, is_causal=is_causal, bwd_mode=mode, implementation=implementation(dtype)))

    def outer_loss(*arrays):
        return sum(map(squares, jax.grad(loss, (0, 1, 2))(*arrays)))

    return jax.jit(jax.grad(outer_loss, (0, 1, 2)))(*arrays)


@pytest.mark.parametrize(("mode", "dtype", "is_causal"), CASES)
def test_the_gradient_of_the_gradient_runs_and_is_finite(mode, dtype, is_causal):
    for x in meta_gradient(mode, dtype, is_causal):
        assert x.dtype == dtype
        assert jnp.isfinite(x).all() and jnp.any(x != 0)


def main() -> int:
    """Prints a line for each case; the exit status counts those that failed."""
    failed = 0
    for mode, dtype, is_causal in CASES:
        fine = all(bool(jnp.isfinite(x).all()) for x in meta_gradient(mode, dtype, is_causal))
        failed += not fine
        print(f"{mode:20} {dtype:9} {'causal' if is_causal else 'full':7} {'finite' if fine else 'NOT FINITE'}",
              flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
