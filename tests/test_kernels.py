"""The kernels' numerics and launches. Where there is no GPU they run through Triton's interpreter."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import jttt
from jttt.kernels import blocks, schedule
from jttt.kernels.config import Blocks
from tests import jaxprs, plain
from tests.plain import Problem

# Where a query sees one key the gradient is the rounding of a difference of larger numbers, and processors differ.
FLOAT32_TOLERANCE = 4e-6
# What rounding to float16 costs a result that is exact.
FLOAT16_ROUNDING = float(np.finfo(np.float16).eps) / 2

KERNELS = {"forward_kernel", "d_query_kernel", "d_key_value_kernel", "tangent_kernel", "g_query_kernel",
           "g_key_value_kernel"}

attention = functools.partial(jttt.dot_product_attention, implementation="triton")


def orders(problem, arrays, directions):
    return plain.orders(
        lambda *x: plain.joined(*attention(*x, is_causal=problem.is_causal, return_residual=True)),
        arrays, directions)


def plain_joined(problem):
    return lambda *x: plain.joined(*plain.attention(*x, is_causal=problem.is_causal))


@contextlib.contextmanager
def blocks_of(queries, keys):
    """Every kernel takes blocks of this size, small enough that short arrays have several: some
    masked, some wholly visible, some wholly hidden. Yields the names of the kernels that did."""
    taken = set()

    def choose(kernel, *_):
        taken.add(kernel)
        return Blocks(queries, keys, 4, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "choose", choose)
        yield taken


@pytest.mark.parametrize("rows", [1, 80])
def test_some_heads_come_after_the_others_where_a_cache_is_small(rows, monkeypatch):
    """One head at a time, or three or four of ten; outputs that no program writes are NaN."""
    monkeypatch.setattr(schedule, "cached_rows", lambda C: rows)
    monkeypatch.setattr(schedule, "ENOUGH_PROGRAMS", tl.constexpr(1))
    problem = Problem(T=24, S=20, N=5, K=5, H=4, B=2, is_causal=True)
    arrays, directions = problem.draw(np.float32)
    with blocks_of(16, 16) as taken:
        mine = orders(problem, arrays, directions)
    plain.assert_close(mine, plain.exact_orders(plain_joined(problem), arrays, directions), FLOAT32_TOLERANCE)
    assert taken == KERNELS


# Errors.

PROBLEMS = [
    Problem(T=1, S=1),
    Problem(T=1, S=17, N=2, K=1, H=5, E=3, is_causal=True),
    Problem(T=17, S=1, N=2, K=2, H=1, E=40),
    Problem(T=17, S=33, N=4, K=2, H=5, E=7, B=2, is_causal=True),
    Problem(T=33, S=17, N=2, K=2, H=8, B=2, is_causal=True),
    Problem(T=100, S=129, H=40, E=16, is_causal=True),
    Problem(T=129, S=100, H=16, E=96),
    Problem(T=129, S=129, B=1, is_causal=True),
    Problem(T=100, S=33, N=3, K=1, H=96, E=5),
]


@functools.cache
def drawn(problem):
    """Arrays in float16, whose values float32 can have too, and what float64 makes of them."""
    arrays, directions = problem.draw(np.float16)
    return arrays, directions, plain.exact_orders(plain_joined(problem), arrays, directions)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_float32(problem):
    arrays, directions, exact = drawn(problem)
    mine = orders(problem, [x.astype(np.float32) for x in arrays], directions)
    plain.assert_close(mine, exact, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_float16_is_as_accurate_as_plain_float16(problem):
    arrays, directions, exact = drawn(problem)
    mine = orders(problem, arrays, directions)
    theirs = plain.orders(plain_joined(problem), arrays, directions)
    errors = {name: (plain.error(mine[name], exact[name]), plain.error(theirs[name], exact[name])) for name in exact}
    assert all(mine <= 1.5 * theirs + FLOAT16_ROUNDING for mine, theirs in errors.values()), errors


@pytest.mark.oldest
@pytest.mark.parametrize("cut", [(16, 16), (32, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("problem", [
    Problem(T=50, S=90, N=2, K=1, is_causal=True),
    Problem(T=90, S=50, N=1, K=1, is_causal=True),
    Problem(T=70, S=33, N=1, K=1),
], ids=str)
def test_several_blocks(problem, cut):
    check_blocks(problem, cut)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    shape=st.tuples(*[st.integers(1, 60)] * 2), kv_heads=st.integers(1, 2), group=st.integers(1, 2),
    widths=st.tuples(*[st.integers(1, 33)] * 2), batch=st.none() | st.integers(1, 2), is_causal=st.booleans(),
    cut=st.tuples(*[st.sampled_from([16, 32])] * 2),
)
def test_several_blocks_of_any_shape(shape, kv_heads, group, widths, batch, is_causal, cut):
    check_blocks(Problem(*shape, kv_heads * group, kv_heads, *widths, batch, is_causal), cut)


def check_blocks(problem, cut):
    arrays, directions, exact = drawn(problem)
    with blocks_of(*cut) as taken:
        mine = orders(problem, [x.astype(np.float32) for x in arrays], directions)
    assert taken == KERNELS
    plain.assert_close(mine, exact, FLOAT32_TOLERANCE)


@pytest.mark.oldest
def test_two_runs_are_bitwise_equal():
    problem = Problem(T=40, S=50, N=2, K=1, is_causal=True)
    arrays, directions = problem.draw(np.float32)
    first, second = orders(problem, arrays, directions), orders(problem, arrays, directions)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# Work that is not done.


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_blocks_that_a_causal_mask_hides_are_never_visited(side):
    """NaN in them would reach the results, for 0 · NaN is NaN."""
    clean = [np.random.default_rng(i).standard_normal((48, 1, 8), np.float32) for i in range(7)]
    query, key, value, d_output, *direction = (x.copy() for x in clean)
    if side == "keys":
        for x in (key, value, *direction[1:]):
            x[32:] = np.nan
        seen, names = slice(0, 32), ("output", "d_query", "g_query", "g_d_output")
    else:
        for x in (query, d_output, direction[0]):
            x[:16] = np.nan
        seen, names = slice(16, 48), ("d_key", "d_value", "g_key", "g_value")

    @jax.jit
    def linear_orders(query, key, value, d_output, *direction):
        def gradients(query, key, value, d_output):
            output, pull = jax.vjp(functools.partial(attention, is_causal=True), query, key, value)
            return pull(d_output), output

        first, pull, output = jax.vjp(gradients, query, key, value, d_output, has_aux=True)
        return dict(zip(("output", "d_query", "d_key", "d_value", "g_query", "g_key", "g_value", "g_d_output"),
                        (output, *first, *pull(direction)), strict=True))

    with blocks_of(16, 16):
        exact, poisoned = linear_orders(*clean), linear_orders(query, key, value, d_output, *direction)
    for name in names:
        np.testing.assert_array_equal(poisoned[name][seen], exact[name][seen], err_msg=name)


def test_inputs_are_read_in_place():
    """Odd lengths and widths, grouped heads: there is the kernel, and nothing around it."""
    arrays, _ = Problem(T=17, S=33, N=4, K=2, H=5, E=7, B=2).draw(np.float32)
    lowered = jax.jit(functools.partial(attention, is_causal=True)).lower(*arrays).as_text()
    assert set(re.findall(r"= stablehlo\.(\w+)", lowered)) == {"custom_call"}


@pytest.mark.oldest
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_kernels_leave_nothing_of_size_T_by_S(implementation):
    arrays, directions = Problem(T=170, S=130, N=2, K=1, B=1).draw(np.float32)

    def run(*arrays):
        return plain.orders(lambda *x: plain.joined(
            *jttt.dot_product_attention(*x, implementation=implementation, return_residual=True)), arrays, directions)

    lowered = jax.jit(run).lower(*arrays).as_text()
    assert bool(re.search("170x130|130x170", lowered)) == (implementation == "xla")


# Under vmap, which joins the batch of one launch and copies no operand.

MAPPED = [
    [(0, 0, 0)],
    [(0, None, None)],
    [(None, 0, 0)],
    [(0, None, 0), (None, 0, None)],
    [(None, -1, 0), (1, None, 0), (None, 0, None)],
]


def nested(transform, function, levels):
    """`function` under one `transform(…, in_axes=…)` for each level, the innermost first."""
    for in_axes in levels:
        function = transform(function, in_axes=in_axes)
    return function


def python_loop(function, in_axes):
    """What `jax.vmap` does, spelled out."""
    def looped(*arrays):
        size = max(x.shape[axis] for x, axis in zip(arrays, in_axes, strict=True) if axis is not None)
        results = [function(*(x if axis is None else jnp.take(x, i, axis)
                              for x, axis in zip(arrays, in_axes, strict=True))) for i in range(size)]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return looped


def mapped_arrays(levels):
    """Query, key and value with the mapped axes of every level, two long."""
    arrays, _ = Problem(T=5, S=6, N=2, K=1, H=3, E=4, B=1).draw(np.float32)
    for in_axes in levels:
        arrays = [x if axis is None else np.stack([x, np.flip(x)], axis)
                  for x, axis in zip(arrays, in_axes, strict=True)]
    return arrays


@pytest.mark.parametrize("levels", MAPPED, ids=str)
def test_derivatives_of_vmap(levels):
    arrays = mapped_arrays(levels)
    slow = nested(python_loop, lambda *x: plain.attention(*x)[0], levels)
    generator = np.random.default_rng(1)
    directions = [generator.standard_normal(x.shape, np.float32) for x in (jax.eval_shape(slow, *arrays), *arrays)]
    mine = plain.orders(nested(jax.vmap, attention, levels), arrays, directions)
    plain.assert_close(mine, plain.exact_orders(slow, arrays, directions), FLOAT32_TOLERANCE)


@pytest.mark.oldest
@pytest.mark.parametrize("levels", MAPPED, ids=str)
def test_vmap_of_derivatives(levels):
    arrays = mapped_arrays(levels)
    _, directions = Problem(T=5, S=6, N=2, K=1, H=3, E=4, B=1).draw(np.float32)

    def mapped(transform, function):
        run = nested(transform, lambda *x: plain.orders(
            lambda *y: plain.joined(*function(*y)), x, directions), levels)
        return jax.jit(run)(*arrays)

    mine = mapped(jax.vmap, functools.partial(attention, return_residual=True))
    plain.assert_close(mine, mapped(python_loop, plain.attention), 2 * FLOAT32_TOLERANCE)


@pytest.mark.oldest
@pytest.mark.parametrize("levels", MAPPED, ids=str)
def test_vmap_is_one_launch_and_copies_no_operand(levels):
    arrays = mapped_arrays(levels)
    sizes = {name: x.size for name, x in zip(("query", "key", "value"), arrays, strict=True)}

    def assert_not_copied(equation):
        shapes = jaxprs.operands(equation)
        assert {name: math.prod(shapes[name].shape) for name in sizes} == sizes

    (forward,) = jaxprs.passes(nested(jax.vmap, attention, levels), *arrays)
    assert_not_copied(forward)

    def meta(*arrays):
        gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), (0, 1, 2))
        return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in gradients(*x)), (0, 1, 2))(*arrays)

    passes = jaxprs.passes(nested(jax.vmap, meta, levels), *arrays)
    assert [x.params["name"] for x in passes] == ["forward", "backward", "tangent", "double_backward", "backward"]
    for equation in passes:
        assert_not_copied(equation)
