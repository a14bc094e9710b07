"""The modes of the backward: the same results as float64 attention, who carries them out, what they store."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jttt.modes
from jttt import passes as main_passes
from jttt.modes import BWD_MODES, passes, plain
from jttt.spec import AttentionSpec, Band
from tests import devices
from tests import plain as independent
from tests.plain import Problem

ROOT = Path(__file__).parents[1]
OTHERS = BWD_MODES[1:]

attention = jttt.modes.dot_product_attention


@functools.cache
def drawn(problem, dtype):
    arrays, (first, *others) = problem.draw(dtype)
    directions = [first[..., :-1], *others]  # No log-sum-exp here.
    return arrays, directions, exact(problem, arrays, directions)


def exact(problem, arrays, directions):
    return independent.exact_orders(
        lambda *x: independent.attention(*x, is_causal=problem.is_causal)[0], arrays, directions)


# Results.

PROBLEMS = [
    Problem(T=1, S=3, H=3),
    # Several blocks of each axis, some of them hidden.
    Problem(T=70, S=100, N=2, K=1, H=8, B=1, is_causal=True),
    Problem(T=130, S=70, N=1, K=1, H=20, E=5, B=2),
]


@pytest.mark.parametrize(("problem", "implementation"), [
    *((problem, "triton") for problem in PROBLEMS), (PROBLEMS[1], "xla")], ids=str)
@pytest.mark.parametrize("mode", OTHERS)
def test_float32_orders_zero_to_two(mode, problem, implementation):
    arrays, directions, expected = drawn(problem, np.float32)
    results = independent.orders(functools.partial(
        attention, is_causal=problem.is_causal, bwd_mode=mode, implementation=implementation), arrays, directions)
    independent.assert_close(results, expected, 2e-6)


@pytest.mark.parametrize("mode", OTHERS)
def test_float16_results_keep_their_dtype_and_are_as_exact_as_float16(mode):
    arrays, directions, expected = drawn(PROBLEMS[1], np.float16)
    results = independent.orders(
        functools.partial(attention, is_causal=True, bwd_mode=mode, implementation="triton"), arrays, directions)
    assert all(x.dtype == np.float16 for x in results.values())
    independent.assert_close(results, expected, 2 * np.finfo(np.float16).eps)


@pytest.mark.oldest
@pytest.mark.parametrize("mode", ["recompute", "save_p_triton_full"])
def test_order_three(mode, float64):
    arrays, _ = Problem(T=4, S=5, N=2, K=1, H=3, E=2, is_causal=True).draw(np.float64)

    def third(function):
        def first(*arrays):
            return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))(*arrays)

        def second(*arrays):
            return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in first(*x)), (0, 1, 2))(*arrays)

        return jax.jit(jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in second(*x)), (0, 1, 2)))(*arrays)

    mine = third(functools.partial(attention, is_causal=True, bwd_mode=mode))
    theirs = third(lambda *x: independent.attention(*x, is_causal=True)[0])
    for x, y in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", OTHERS)
def test_scale_and_vmap(mode, float64):
    """A mapped query on keys that are not: as one call after another."""
    arrays, _ = Problem(T=5, S=4, N=2, K=1, H=3, B=3).draw(np.float64)
    query, (key, value) = arrays[0], (x[0] for x in arrays[1:])

    def gradient(query, key, value):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x, scale=0.7, bwd_mode=mode))), (0, 1, 2))(
            query, key, value)

    mapped = jax.vmap(gradient, (0, None, None))(query, key, value)
    for i, one in enumerate(query):
        for x, y in zip(mapped, gradient(one, key, value), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-12)
    expected = independent.attention(query[0], key, value, scale=0.7)[0]
    np.testing.assert_allclose(attention(query[0], key, value, scale=0.7, bwd_mode=mode), expected, rtol=1e-12)


@pytest.mark.parametrize("mode", OTHERS)
def test_shard_map(mode):
    """Query heads are divided; all of them attend to one key head, which varies over no axis."""
    arrays, _ = Problem(T=5, S=4, N=4, K=1, H=3, B=1).draw(np.float32)
    heads = P(None, None, "model")
    mapped = jax.shard_map(functools.partial(attention, bwd_mode=mode), mesh=devices.mesh(model=4),
                           in_specs=(heads, P(), P()), out_specs=heads)

    def meta_gradients(function):
        gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))
        return jax.jit(jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in gradients(*x)), (0, 1, 2)))(*arrays)

    for x, y in zip(meta_gradients(mapped), meta_gradients(jttt.dot_product_attention), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# Kernels.


def operands_of(name, M=1, T=70, S=70, H=8, dtype=np.float32, random=None):
    """Operands of a pass, by name; shapes alone without random."""
    shapes = dict.fromkeys(("query", "output", "d_output", "t_query"), ((M, T, H), dtype))
    shapes |= dict.fromkeys(("key", "value", "t_key", "t_value"), ((M, S, H), dtype)) | {"p": ((M, T, S), dtype)}
    shapes |= dict.fromkeys(("delta", "mean", "row_term"), ((M, T), np.float32))
    wanted = [array for array in inspect.signature(getattr(plain, name)).parameters if array != "spec"]
    if random is None:
        return {array: jax.ShapeDtypeStruct(*shapes[array]) for array in wanted}
    return {array: random.standard_normal(shapes[array][0]).astype(shapes[array][1]) for array in wanted}


@pytest.mark.parametrize("name", ["d_value", "row_sum", "d_query", "d_key", "tangent", "g_query", "g_key_value"])
def test_kernels_skip_the_tiles_of_p_that_a_causal_mask_hides(name):
    """Those are NaN here; a kernel that read one would say so."""
    operands = operands_of(name, random=np.random.default_rng(0))
    visible = np.tri(70, dtype=np.float32)
    expected = getattr(plain, name)(AttentionSpec(0.5), **operands | {"p": operands["p"] * visible})
    tiles = np.arange(70) // 32  # of both axes, in float32
    hidden = np.where(tiles[None, :] > tiles[:, None], np.nan, visible)
    operands["p"] = (operands["p"] * hidden).astype(np.float32)
    spec = AttentionSpec(0.5, Band(right=0), implementation="triton")
    for array, x in passes.run(name, spec, **operands).items():
        np.testing.assert_allclose(x, expected[array], rtol=2e-4, atol=2e-4)


def test_hidden_entries_of_p_are_zeros():
    operands = operands_of("forward", random=np.random.default_rng(0))
    p = passes.run("forward", AttentionSpec(0.5, Band(right=0), implementation="triton"), **operands)["p"]
    assert not np.any(np.triu(p[0], 1)) and np.allclose(np.sum(p, -1), 1)


@pytest.mark.slow
def test_every_kernel_fits_the_gpus_that_it_is_for():
    program = """
import functools, jax, jax.numpy as jnp
from benchmarks import resources
from jttt.modes import kernels, plain
from jttt.spec import AttentionSpec, Band
from tests.test_modes import operands_of
for capability, width in ((80, 128), (90, 64)):
    for name in kernels.KERNELS:
        spec, operands = AttentionSpec(0.1, Band(right=0)), operands_of(name, 2, 512, 512, width, jnp.bfloat16)
        made = jax.eval_shape(functools.partial(getattr(plain, name), spec), **operands)
        kernel, arguments, outputs, _, options = kernels.plan(name, spec, operands, made)
        _, spilled, shared = resources.compile_kernel(kernel, arguments, outputs, capability, options)
        assert shared <= resources.SHARED_MEMORY[capability], (name, capability, width, shared)
        assert spilled <= 512, (name, capability, width, spilled)
"""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment | {"PYTHONPATH": "."},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Who carries them out, and what they store.


def count_passes(function, *arrays):
    """The passes of a jaxpr by name, of the modes and of the main path; and how many arrays of T×S it computes
    outside of them. (A broadcast zero stands for the cotangent of P that nothing reads.)"""
    T, S = arrays[0].shape[-3], arrays[1].shape[-3]
    names, square = [], 0

    def visit(jaxpr):
        nonlocal square
        for equation in jaxpr.eqns:
            inner = [x for x in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))
                     if hasattr(x, "eqns")]
            if equation.primitive.name in ("attention_pass", "attention_mode_pass"):
                names.append(equation.params["name"])
            elif not inner and equation.primitive.name != "broadcast_in_dim":
                square += sum(x.aval.shape[-2:] == (T, S) for x in equation.outvars)
            for x in inner:
                visit(getattr(x, "jaxpr", x))

    visit(jax.make_jaxpr(function)(*arrays).jaxpr)
    return names, square


def meta_gradient(mode, **options):
    def first(*arrays):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x, bwd_mode=mode, **options))), (0, 1, 2))(*arrays)

    return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in first(*x)), (0, 1, 2))


def test_who_carries_out_each_mode():
    arrays, _ = Problem(T=6, S=7, N=1, K=1, H=3).draw(np.float32)
    made = {mode: count_passes(meta_gradient(mode), *arrays) for mode in BWD_MODES}
    names = {mode: names for mode, (names, _) in made.items()}
    assert names["recompute"] == ["forward"]
    assert names["save_p"] == ["forward"]
    assert names["save_p_triton_bwd"] == ["forward", "d_value", "d_value"]
    backward = ["row_sum", "d_query", "d_key", "d_value"]
    assert names["save_p_triton_full"] == ["forward", *backward, "tangent", "g_key_value", "g_query", *backward]
    squares = {mode: squares for mode, (_, squares) in made.items()}
    assert squares["flash"] == squares["save_p_triton_full"] == 0
    assert all(squares[mode] > 5 for mode in ("recompute", "save_p", "save_p_triton_bwd"))


def test_kernels_run_on_cuda_alone_unless_named(monkeypatch):
    arrays, _ = Problem(T=6, S=6).draw(np.float32)
    monkeypatch.setattr(main_passes, "interprets_triton", lambda: False)

    def lowered_for_cpu(implementation):
        function = functools.partial(attention, bwd_mode="save_p", implementation=implementation)
        return jax.export.export(jax.jit(function), platforms=["cpu"])(*arrays).mlir_module()

    assert "custom_call" not in lowered_for_cpu(None)
    with pytest.raises(ValueError, match="implementation was 'triton', but the computation is lowered for cpu"):
        lowered_for_cpu("triton")


# Arguments.


def test_an_unknown_mode_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="bwd_mode was 'fast': expected one of 'flash', 'recompute', 'save_p', "
                                         "'save_p_triton_bwd', 'save_p_triton_full'"):
        attention(*Problem(T=2, S=2).draw(np.float32)[0], bwd_mode="fast")


@pytest.mark.parametrize("mode", BWD_MODES)
def test_arguments_are_checked_as_those_of_the_main_function(mode):
    query, key, value = Problem(T=2, S=3, B=1).draw(np.float32)[0]
    with pytest.raises(ValueError, match="key has head width 7 and query 8: expected the same"):
        attention(query, key[..., :7], value, bwd_mode=mode)
    with pytest.raises(TypeError, match="scale was"):
        attention(query, key, value, scale=jnp.ones(()), bwd_mode=mode)


# On a GPU.


@functools.cache
def problem_on_a_gpu(dtype, B, T, N, H, causal):
    """(arrays, directions, exact results, XLA's errors)"""
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.standard_normal((B, T, N, H), np.float32), dtype) for _ in range(3)]
    directions = [generator.standard_normal((B, T, N, H), np.float32) for _ in range(4)]
    expected = independent.exact_orders(
        lambda *x: independent.attention(*x, is_causal=causal)[0], arrays, directions)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        xla = independent.orders(functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, implementation="xla"), arrays, directions)
    return arrays, directions, expected, {name: independent.error(xla[name], x) for name, x in expected.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [("float16", 1, 1024, 1, 64, True), ("bfloat16", 2, 1000, 3, 96, False),
                                     ("bfloat16", 1, 300, 2, 256, True), ("float32", 1, 300, 2, 64, True)], ids=str)
@pytest.mark.parametrize("mode", OTHERS)
def test_errors_on_a_gpu_are_near_those_of_xla(mode, problem):
    arrays, directions, expected, xla = problem_on_a_gpu(*problem)
    mine = independent.orders(functools.partial(
        attention, is_causal=problem[-1], bwd_mode=mode, implementation="triton"), arrays, directions)
    errors = {name: (independent.error(mine[name], x), xla[name]) for name, x in expected.items()}
    print(" ".join(f"{name} {ours:.1e}/{theirs:.1e}" for name, (ours, theirs) in errors.items()))
    for name, (ours, theirs) in errors.items():
        # P is rounded before its row sums are taken, which XLA does not do.
        assert ours <= 2 * theirs + 1e-6, (name, errors)
