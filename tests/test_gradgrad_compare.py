"""A spot check: forward, gradient and meta-gradient of every mode against math in float64, on one small problem.

    python tests/test_gradgrad_compare.py        # the table alone: largest absolute errors, and their bounds
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # A checkout need not be installed.
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt.modes
from jttt import passes

B, H, T, D = 1, 1, 64, 64
DTYPES = ("float32", "float16", "bfloat16")

# Largest error, in roundings of the largest number of an array. Half precision rounds P, dS and what follows.
ROUNDINGS = {"float32": 32, "float16": 4, "bfloat16": 4}


def inputs(dtype: str) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [np.asarray(jnp.asarray(generator.standard_normal((B, T, H, D)), dtype)) for _ in range(3)]


def math_attention(query, key, value, *, is_causal):
    """The textbook's, in the dtype of its inputs."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(D)
    if is_causal:
        scores = jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), value)


def orders(attention, arrays) -> dict[str, np.ndarray]:
    """The output; g, the gradient of Σ output²; and the gradient of Σ g²."""
    def squares(x):
        return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2)

    def loss(*arrays):
        return squares(attention(*arrays))

    def outer_loss(*arrays):
        return sum(map(squares, jax.grad(loss, (0, 1, 2))(*arrays)))

    @jax.jit
    def every(*arrays):
        return attention(*arrays), jax.grad(loss, (0, 1, 2))(*arrays), jax.grad(outer_loss, (0, 1, 2))(*arrays)

    output, gradient, meta = every(*arrays)
    return {"forward": np.asarray(output)[None], "gradient": np.stack(gradient), "meta-gradient": np.stack(meta)}


@functools.cache
def exact(dtype: str, is_causal: bool) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in inputs(dtype)]
        return orders(functools.partial(math_attention, is_causal=is_causal), arrays)


def errors(mode: str, dtype: str, is_causal: bool) -> dict[str, tuple[float, float]]:
    """{order: (largest absolute error, its bound)}"""
    # Kernels wherever there is something that runs them; Triton's interpreter has no bfloat16.
    kernels = passes.interprets_triton() and dtype != "bfloat16"
    results = orders(functools.partial(
        jttt.modes.dot_product_attention, is_causal=is_causal, bwd_mode=mode,
        implementation="triton" if kernels else None), inputs(dtype))
    rounding = float(jnp.finfo(dtype).eps) / 2
    return {name: (float(np.max(np.abs(results[name].astype(np.float64) - x))),
                   ROUNDINGS[dtype] * rounding * float(np.max(np.abs(x))))
            for name, x in exact(dtype, is_causal).items()}


def line(mode: str, dtype: str, is_causal: bool, found: dict[str, tuple[float, float]]) -> str:
    cells = "  ".join(f"{name} {error:.1e} (≤ {bound:.1e})" for name, (error, bound) in found.items())
    return f"{mode:20} {dtype:9} {'causal' if is_causal else 'full':7} {cells}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", jttt.modes.BWD_MODES)
def test_errors_are_those_of_rounding(mode, dtype, is_causal):
    found = errors(mode, dtype, is_causal)
    print(line(mode, dtype, is_causal, found))
    for name, (error, bound) in found.items():
        assert error <= bound, name


def main() -> int:
    """Prints a line for each mode, dtype and mask; the exit status counts the errors out of bounds."""
    print(f"largest absolute error against math in float64: B={B} N={H} T={T} H={D}")
    failed = 0
    for mode in jttt.modes.BWD_MODES:
        for dtype in DTYPES:
            for is_causal in (False, True):
                found = errors(mode, dtype, is_causal)
                failed += sum(not error <= bound for error, bound in found.values())
                print(line(mode, dtype, is_causal, found), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
