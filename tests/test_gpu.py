"""The real kernels on a GPU: `pytest -m gpu`. Skipped where there is none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests import dense, plain, test_ahead_of_time, test_forward_mode, test_transformations
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
        # A few numbers are too few for two errors to be alike.
        slack = 1e-6 if exact[name].size > 100 else float(jnp.finfo(dtype).eps) / 4
        assert mine <= 1.5 * theirs + slack, (name, errors)


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


@pytest.mark.parametrize(("dtype", "kind"), [
    ("bfloat16", "causal_window"), ("bfloat16", "mask"), ("bfloat16", "everything"), ("float16", "bias"),
    ("float32", "everything")])
def test_tangents_are_as_exact_as_those_of_plain_formulas(dtype, kind):
    # Of values that every dtype has.
    arguments = dense.floats(dense.floats(SIZES.draw() | KINDS[kind], jnp.dtype("bfloat16")), np.float32)
    half = dense.floats(arguments, jnp.dtype(dtype))
    ours, plain_formulas = (test_forward_mode.jvp(functools.partial(
        jttt.dot_product_attention, implementation=implementation, return_residual=True), half, dense.INPUTS)
        for implementation in ("triton", "xla"))
    with jax.enable_x64(True):
        inputs = dense.floats({name: x for name, x in arguments.items() if name in dense.INPUTS}, np.float64)
        options = {name: x for name, x in arguments.items() if name in dense.OPTIONS}
        exact = test_forward_mode.jvp(
            functools.partial(dense.attention, seen=dense.seen(arguments), **options), inputs, dense.INPUTS)
    for name in ("t_output", "t_lse"):
        mine, theirs = (plain.error(x[name], exact[name]) for x in (ours, plain_formulas))
        assert mine <= 1.5 * theirs + 1e-6, (name, mine, theirs)


# JAX's transformations, around kernels. What one GPU can show.


@pytest.mark.parametrize(("policy", "forwards"), [
    (test_transformations.SAVE_NAMES, 2), (jax.checkpoint_policies.nothing_saveable, 3)])
def test_test_time_training(policy, forwards):
    """vmap in scan in checkpoint in grad: two forwards, of the scanned step and of the last chunk, and one more
    where the backward sweep has to make again what was not saved."""
    generator = np.random.default_rng(0)
    size = test_transformations.HEADS * test_transformations.WIDTH
    weights = {name: generator.standard_normal((size, size), np.float32) / 3
               for name in ("query", "key", "value", "output")}
    chunks = generator.standard_normal((3, test_transformations.EXAMPLES, 96, size), np.float32)

    def differentiate(attention):
        return jax.jit(jax.grad(functools.partial(test_transformations.outer_loss, attention, policy)))

    ours = functools.partial(test_transformations.ours, implementation="triton")
    mine = differentiate(ours)(weights, chunks)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (weights, chunks))
        exact = jax.tree.map(np.asarray, differentiate(test_transformations.theirs)(*wide))
    plain.assert_close(mine, exact, 1e-3)
    lowered = differentiate(ours).lower(weights, chunks).as_text()
    assert test_ahead_of_time.kernels_called(lowered).count("forward_kernel") == forwards


def test_mapped_per_example_gradients():
    """Of unmapped parameters: one launch for the batch that vmap makes."""
    generator = np.random.default_rng(0)
    key, value = (generator.standard_normal((1, 300, 2, 64), np.float32) for _ in range(2))
    queries = generator.standard_normal((3, 1, 200, 4, 64), np.float32)

    def per_example(attention):
        def loss(key, value, query):
            return jnp.sum(jnp.sin(attention(query, key, value)))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0)))

    mine = per_example(functools.partial(jttt.dot_product_attention, implementation="triton"))
    with jax.enable_x64(True):
        exact = per_example(lambda *x: plain.attention(*x)[0])(*(x.astype(np.float64) for x in (key, value, queries)))
        exact = [np.asarray(x) for x in exact]
    for x, y in zip(mine(key, value, queries), exact, strict=True):
        assert plain.error(x, y) < 1e-4
    calls = test_ahead_of_time.kernels_called(mine.lower(key, value, queries).as_text())
    assert sorted(calls) == ["d_key_value_kernel", "forward_kernel"]


def test_an_exported_program_runs():
    x = np.random.default_rng(0).standard_normal((2, 128, 4, 64), np.float32).astype(jnp.bfloat16)
    function = jax.jit(test_ahead_of_time.meta_gradient(
        functools.partial(jttt.dot_product_attention, is_causal=True, implementation="triton")))
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=[
        jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")])(x, x, x)
    for mine, direct in zip(exported.call(x, x, x), function(x, x, x), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(direct, np.float32))
