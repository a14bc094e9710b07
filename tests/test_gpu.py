"""The real kernels on a GPU: `pytest -m gpu`. Skipped where there is none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests import dense, plain
from tests.dense import Sizes

pytestmark = pytest.mark.gpu

# B, T, S, N, K, H, causal
SHAPES = [
    (1, 4096, 4096, 2, 2, 128, True),
    (1, 4096, 4096, 1, 1, 64, False),
    (2, 1000, 1300, 4, 2, 96, True),
    (2, 1300, 1000, 4, 1, 64, True),
    (1, 129, 100, 2, 1, 40, False),
    (1, 100, 129, 2, 2, 256, True),
    (1, 256, 3, 2, 2, 16, False),
    (1, 1, 17, 1, 1, 1, True),
    (3, 33, 33, 3, 3, 5, True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_errors_are_at_most_those_of_xla(dtype, shape):
    B, T, S, N, K, H, causal = shape
    generator = np.random.default_rng(0)

    def random(*shape):
        return generator.standard_normal(shape, np.float32)

    arrays = [jnp.asarray(x, dtype) for x in (random(B, T, N, H), random(B, S, K, H), random(B, S, K, H))]
    directions = [random(*arrays[0].shape), *(random(*x.shape) for x in arrays)]

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        exact = plain.orders(lambda *x: plain.attention(*x, is_causal=causal)[0], wide,
                             [jnp.asarray(np.asarray(x, np.float64)) for x in directions])
        exact = {name: np.asarray(x) for name, x in exact.items()}
    ours = plain.orders(
        lambda *x: jttt.dot_product_attention(*x, is_causal=causal, implementation="triton"), arrays, directions)
    # XLA would otherwise make float32 products in TF32, which is easy to beat.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        # In float16 XLA refuses the product algorithm that jax.nn names where a product degenerates.
        theirs = jttt.dot_product_attention if dtype == "float16" and H == 1 else jax.nn.dot_product_attention
        xla = plain.orders(lambda *x: theirs(*x, is_causal=causal, implementation="xla"), arrays, directions)

    errors = {name: (plain.error(ours[name], exact[name]), plain.error(xla[name], exact[name])) for name in exact}
    print(" ".join(f"{name} {mine:.1e}/{theirs:.1e}" for name, (mine, theirs) in errors.items()))
    for name, (mine, theirs) in errors.items():
        assert mine <= 1.5 * theirs + 1e-6, (name, errors)


# Masks, biases, soft cap and sinks. jax.nn lacks most of them, so plain formulas of jttt are what to compare with.

SIZES = Sizes(B=2, T=1000, S=1500, N=4, K=2, H=64, E=96)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)


@pytest.mark.parametrize(("dtype", "kind"), [
    *(("bfloat16", kind) for kind in (
        "key_lengths", "causal_window", "traced_offset", "key_ranges", "unsorted_segments", "mask", "mask_of_each",
        "bias", "bias_of_keys", "soft_cap", "sinks", "everything")),
    *(("float16", kind) for kind in ("documents", "bias", "everything")),
    *(("float32", kind) for kind in ("mask", "bias", "everything")),
])
def test_masked_errors_are_at_most_those_of_plain_formulas(dtype, kind):
    arguments = dense.floats(SIZES.draw() | KINDS[kind], jnp.dtype(dtype))
    exact = dense.exact_orders(arguments)
    ours, plain_formulas = (dense.orders(functools.partial(
        jttt.dot_product_attention, implementation=implementation, return_residual=True), arguments)
        for implementation in ("triton", "xla"))

    errors = {name: (plain.error(ours[name], x), plain.error(plain_formulas[name], x)) for name, x in exact.items()}
    print(" ".join(f"{name} {mine:.1e}/{theirs:.1e}" for name, (mine, theirs) in errors.items()))
    for name, (mine, theirs) in errors.items():
        # Gradients of sinks are N numbers, too few for two errors to be alike.
        factor = 5 if name.endswith("sinks") else 1.5
        assert mine <= factor * theirs + 1e-6, (name, errors)
