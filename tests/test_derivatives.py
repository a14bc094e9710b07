"""The chain of derivative rules, in float64 on the CPU, where rounding hides nothing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jttt
from tests import jaxprs, plain
from tests.plain import Problem

pytestmark = pytest.mark.usefixtures("float64")

TOLERANCE = 1e-11

QUERY, KEY, VALUE = range(3)
ARGUMENTS = ("query", "key", "value")
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(3), size)]

# Which outputs a loss looks at. The others have a cotangent that is structurally zero.
VIEWS = {
    "output": lambda output, lse: output,
    "lse": lambda output, lse: lse,
    "both": plain.joined,
}

attention = functools.partial(jttt.dot_product_attention, return_residual=True)


def curved_sum(arrays):
    """A scalar with no derivative that is zero or constant."""
    return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(arrays))


def gradient(function, view="output", argnums=(0, 1, 2)):
    """The gradient of a curved function of what `function(...) -> (output, lse)` returns."""
    return jax.grad(lambda *arrays: curved_sum([VIEWS[view](*function(*arrays))]), argnums)


def meta_gradient(function, view="output", inner=(0, 1, 2), outer=(0, 1, 2)):
    """The gradient of a curved function of `gradient`."""
    return jax.grad(lambda *arrays: curved_sum(gradient(function, view, inner)(*arrays)), outer)


def third_order(function, argnums=(0, 1, 2)):
    return jax.grad(lambda *arrays: curved_sum(meta_gradient(function, "both", argnums, argnums)(*arrays)), argnums)


def assert_equal(mine, exact):
    for x, y in zip(mine, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)


# Values, against JAX's autodiff of plain attention.

PROBLEMS = [
    Problem(T=1, S=1, H=3),
    Problem(T=5, S=8, N=2, K=2, H=4),
    Problem(T=7, S=5, N=4, K=2, H=5, E=3, B=2, is_causal=True),
    Problem(T=4, S=6, N=3, K=1, H=1, E=6, B=1, is_causal=True),
]


@pytest.mark.oldest
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_orders_zero_to_two(problem):
    check_orders(problem)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 2), kv_heads=st.integers(1, 3), group=st.integers(1, 3),
    widths=st.tuples(*[st.integers(1, 9)] * 2), batch=st.none() | st.integers(1, 3), is_causal=st.booleans(),
    implementation=st.sampled_from([None, "xla"]),
)
def test_orders_zero_to_two_of_any_shape(shape, kv_heads, group, widths, batch, is_causal, implementation):
    check_orders(Problem(*shape, kv_heads * group, kv_heads, *widths, batch, is_causal), implementation)


def check_orders(problem, implementation=None):
    causal = dict(is_causal=problem.is_causal)
    arrays, directions = problem.draw(np.float64)
    mine = plain.orders(
        lambda *x: plain.joined(*attention(*x, **causal, implementation=implementation)), arrays, directions)
    exact = plain.orders(lambda *x: plain.joined(*plain.attention(*x, **causal)), arrays, directions)
    plain.assert_close(mine, exact, TOLERANCE)


@pytest.mark.oldest
@pytest.mark.parametrize("argnums", [(0, 1, 2), (0,)], ids=str)
def test_order_three(argnums):
    problem = Problem(T=4, S=5, N=2, K=1, H=3, E=2, is_causal=True)
    arrays, _ = problem.draw(np.float64)
    mine, exact = (jax.jit(third_order(functools.partial(f, is_causal=True), argnums))(*arrays)
                   for f in (attention, plain.attention))
    assert_equal(mine, exact)


def test_orders_one_to_three_against_finite_differences():
    arrays, _ = Problem(T=3, S=4, N=2, K=1, H=2, E=3, B=1, is_causal=True).draw(np.float64)
    check_grads(jax.jit(functools.partial(attention, is_causal=True)), arrays, order=3, modes=["rev"])


@pytest.mark.parametrize("view", ["output", "lse"])
@pytest.mark.parametrize("inner", SUBSETS, ids=str)
def test_gradients_of_some_arguments_from_some_outputs(inner, view):
    arrays, _ = Problem(T=4, S=5, N=2, K=1, H=3, E=2, is_causal=True).draw(np.float64)
    mine, exact = (jax.jit(meta_gradient(functools.partial(f, is_causal=True), view, inner))(*arrays)
                   for f in (attention, plain.attention))
    assert_equal(mine, exact)


def test_hessian():
    """Jacobians map the rules over cotangents alone: query, key and value stay unmapped."""
    arrays, _ = Problem(T=2, S=3, N=2, K=1, H=2).draw(np.float64)
    mine, exact = (jax.jit(jax.jacrev(gradient(f), (0, 1, 2)))(*arrays) for f in (attention, plain.attention))
    assert_equal(jax.tree.leaves(mine), jax.tree.leaves(exact))


@pytest.mark.oldest
def test_traced_scale_is_differentiable():
    arrays, _ = Problem(T=4, S=5, N=2, K=1, H=3).draw(np.float64)

    def meta(function):
        def loss(scale, *arrays):
            return curved_sum([VIEWS["both"](*function(*arrays, scale=scale))])

        return jax.jit(jax.grad(lambda *x: curved_sum(jax.grad(loss, (0, 1, 2, 3))(*x)), (0, 1, 2, 3)))

    assert_equal(meta(attention)(0.3, *arrays), meta(plain.attention)(0.3, *arrays))


def test_scale_given_as_a_number():
    arrays, _ = Problem(T=4, S=5).draw(np.float64)
    assert_equal(attention(*arrays, scale=2), plain.attention(*arrays, scale=2))


# What is left out, read from jaxprs.

SMALL = Problem(T=4, S=5, N=2, K=1, H=3).draw(np.float64)[0]


def named(prefix, argnums):
    return {f"{prefix}_{ARGUMENTS[i]}" for i in argnums}


@pytest.mark.oldest
@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
def test_a_gradient_makes_only_what_is_asked(argnums):
    forward, backward = jaxprs.passes(gradient(attention, argnums=argnums), *SMALL)
    assert (forward.params["name"], backward.params["name"]) == ("forward", "backward")
    assert set(backward.params["wanted"]) == named("d", argnums)


@pytest.mark.oldest
@pytest.mark.parametrize("asks_for_all", [False, True])
@pytest.mark.parametrize("used", SUBSETS, ids=str)
def test_a_meta_gradient_follows_only_directions_there_are(used, asks_for_all):
    """Whether the other gradients were not asked for, or asked for and not used."""
    asked = (QUERY, KEY, VALUE) if asks_for_all else used

    def loss(*arrays):
        gradients = dict(zip(asked, gradient(attention, argnums=asked)(*arrays), strict=True))
        return curved_sum(gradients[i] for i in used)

    _, _, tangent, double_backward, _ = jaxprs.passes(jax.grad(loss, (0, 1, 2)), *SMALL)
    for equation, name in ((tangent, "tangent"), (double_backward, "double_backward")):
        assert equation.params["name"] == name
        directions = set(equation.params["operands"]) & named("t", (QUERY, KEY, VALUE))
        assert directions == named("t", used)


@pytest.mark.parametrize("outer", SUBSETS, ids=str)
def test_a_meta_gradient_makes_only_what_is_asked(outer):
    *_, double_backward, backward = jaxprs.passes(meta_gradient(attention, outer=outer), *SMALL)
    assert set(double_backward.params["wanted"]) == named("g", outer)
    assert set(backward.params["wanted"]) == named("d", outer)


def test_value_has_no_gradient_through_a_gradient_of_value():
    """d_value = Pᵀ dO does not depend on value, except through dO."""
    equations = jaxprs.passes(meta_gradient(attention, inner=(VALUE,)), *SMALL)
    assert set(equations[3].params["wanted"]) == named("g", (QUERY, KEY))


def test_a_constant_cotangent_needs_neither_its_own_gradient_nor_a_last_backward():
    def loss(*arrays):
        return jnp.sum(attention(*arrays)[0])

    meta = jax.grad(lambda *arrays: curved_sum(jax.grad(loss, (0, 1, 2))(*arrays)), (0, 1, 2))
    passes = jaxprs.passes(meta, *SMALL)
    assert [x.params["name"] for x in passes] == ["forward", "backward", "tangent", "double_backward"]
    assert "t_output" not in passes[2].params["wanted"]


def test_nothing_is_differentiated_through_a_gradient_that_is_stopped():
    def first_order_meta(*arrays):
        inner = jax.lax.stop_gradient(gradient(attention)(*arrays))
        return curved_sum(attention(*(x - 0.1 * g for x, g in zip(arrays, inner, strict=True))))

    names = jaxprs.names(jax.grad(first_order_meta, (0, 1, 2)), *SMALL)
    assert names == ["forward", "backward", "forward", "backward"]


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse"), 1),
        (jax.checkpoint_policies.save_only_these_names("attention_output"), 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
)
def test_a_remat_policy_that_saves_the_names_does_not_run_forward_again(policy, forwards):
    remat = jax.checkpoint(attention, policy=policy)
    names = jaxprs.names(gradient(remat), *SMALL)
    assert names == ["forward"] * forwards + ["backward"]
    assert_equal(gradient(remat)(*SMALL), gradient(attention)(*SMALL))
