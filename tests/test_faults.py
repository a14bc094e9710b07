"""Faults that other attention libraries have shipped, each impossible here, at order 0, 1 and 2.

Numbers are those of the list of known faults.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests import plain
from tests.plain import Problem

TOLERANCES = {"float32": 1e-5, "float16": 5e-3}

# Both implementations, in the dtypes in which both run on any machine.
EVERYWHERE = pytest.mark.parametrize(("implementation", "dtype"), [
    ("triton", "float32"), ("triton", "float16"), ("xla", "float32"), ("xla", "float16"),
])
EACH_IMPLEMENTATION = pytest.mark.parametrize("implementation", ["triton", "xla"])


def attend(problem, implementation):
    return lambda *x: jttt.dot_product_attention(*x, is_causal=problem.is_causal, implementation=implementation)


def draw(problem, dtype):
    arrays, (weights, *slopes) = problem.draw(dtype)
    return arrays, [weights[..., :-1], *slopes]


def check(problem, implementation, arrays, directions, tolerance):
    """Orders 0, 1 and 2 are finite, and those of plain attention in float64."""
    mine = plain.orders(attend(problem, implementation), arrays, directions)
    exact = plain.exact_orders(
        lambda *x: plain.attention(*x, is_causal=problem.is_causal)[0], arrays, directions)
    plain.assert_close(mine, exact, tolerance)


# Numbers 4 and 7: lengths that are shorter than a block, or no multiple of one.

LENGTHS = [1, 8, 16, 17, 31, 32, 33, 63, 65, 100, 127, 129]


@EACH_IMPLEMENTATION
@pytest.mark.parametrize(("T", "S", "is_causal"), [
    *((T, S, i % 2 == 0) for i, (T, S) in enumerate(zip(LENGTHS, reversed(LENGTHS), strict=True))),
    (33, 33, False), (127, 127, True),
])
def test_4_any_lengths(T, S, is_causal, implementation):
    problem = Problem(T, S, B=1, is_causal=is_causal)
    check(problem, implementation, *draw(problem, "float32"), TOLERANCES["float32"])


@EVERYWHERE
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 3), (256, 3), (256, 1)])
def test_7_few_queries_or_keys(T, S, implementation, dtype):
    problem = Problem(T, S)
    check(problem, implementation, *draw(problem, dtype), TOLERANCES[dtype])


# Number 5: integer operands, under differentiation.


@pytest.mark.oldest
@EACH_IMPLEMENTATION
def test_5_integers_have_no_gradient(implementation):
    (query, key, value), _ = Problem(T=5, S=6, N=2, K=1, B=2).draw("float32")
    arguments = dict(query=query, key=key, value=value)
    integers = dict(
        key_value_seq_lengths=np.array([4, 6], np.int32), key_end=np.array([[5], [4]], np.int32),
        query_segment_ids=np.array([[0, 0, 1, 1, 1]] * 2, np.int32),
        key_value_segment_ids=np.array([[0, 0, 1, 1, 1, 1]] * 2, np.int32), query_offset=np.int32(1))
    visible = np.array([[1, 1, 0, 0, 0, 0]] * 2 + [[0, 0, 1, 1, 0, 0]] * 3, bool)

    def floats(gradients):
        gradients = dict(gradients)
        inputs = [gradients.pop(name) for name in ("query", "key", "value")]
        assert all(x.dtype == jax.dtypes.float0 for x in gradients.values())
        return inputs

    @functools.partial(jax.jit, static_argnums=0)
    def orders(function, arguments):
        """Order 0, 1 and 2 through `jax.vjp` over the whole dictionary."""
        def first_order(arguments):
            output, pull = jax.vjp(lambda x: function(**x), arguments)
            (gradients,) = pull(jnp.cos(output))
            return floats(gradients), output

        first, pull, output = jax.vjp(first_order, arguments, has_aux=True)
        (second,) = pull(jax.tree.map(jnp.cos, first))
        return output, first, floats(second)

    attention = functools.partial(jttt.dot_product_attention, is_causal=True, implementation=implementation)
    mine = orders(attention, arguments | integers)
    theirs = orders(lambda **x: plain.attention(**x, visible=visible)[0], arguments)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# Number 6: cotangents of zeros.


@EVERYWHERE
def test_6_zero_cotangents_give_zeros(implementation, dtype):
    problem = Problem(T=20, S=33, N=2, K=1, is_causal=True)
    arrays, directions = draw(problem, dtype)
    d_output, *directions = (x.astype(dtype) for x in directions)

    @jax.jit
    def backward(d_output, *directions):
        def gradients(*arrays_and_cotangent):
            *arrays, d_output = arrays_and_cotangent
            return jax.vjp(attend(problem, implementation), *arrays)[1](d_output)

        first, pull = jax.vjp(gradients, *arrays, d_output)
        return first, pull(directions)

    def assert_zeros(arrays):
        for x in arrays:
            np.testing.assert_array_equal(x, np.zeros_like(x))

    nothing = [np.zeros_like(x) for x in (d_output, *directions)]
    first, second = backward(*nothing)
    assert_zeros([*first, *second])
    _, second = backward(d_output, *nothing[1:])
    assert_zeros(second)
    first, (*g_inputs, _) = backward(nothing[0], *directions)
    assert_zeros([*first, *g_inputs])


# Number 8: large logits.


@EVERYWHERE
def test_8_logits_with_a_large_mean(implementation, dtype):
    """The softmax does not see what all logits share, here about 900, save that it is rounded to
    float32; derivatives of query and key grow by a factor of 50 an order, and so do their errors."""
    problem = Problem(T=33, S=40, N=2, K=1, is_causal=True)
    (query, key, value), directions = draw(problem, dtype)
    query[..., 0] = key[..., 0] = 50
    check(problem, implementation, [query, key, value], directions, {"float32": 2e-3, "float16": 4e-2}[dtype])


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # Of logits that are masked.
def test_8_inputs_scaled_by_30(implementation, dtype):
    """Every row sees one key alone, or a near tie: gradients are differences of large numbers, and
    half precision has no digit of them left at order two, but it has no infinity or NaN either."""
    problem = Problem(T=33, S=40, N=2, K=1, is_causal=True)
    arrays, directions = draw(problem, dtype)
    arrays = [30 * x for x in arrays]
    mine = plain.orders(attend(problem, implementation), arrays, directions)
    exact = plain.attention(*(x.astype(np.float64) for x in arrays), is_causal=True)[0]
    assert all(np.isfinite(x).all() for x in mine.values())
    assert plain.error(mine["output"], exact) < TOLERANCES[dtype]


# Number 9: half precision on a machine without a GPU.


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_9_half_precision_on_a_cpu(dtype):
    problem = Problem(T=33, S=40, N=4, K=2, E=5, B=2, is_causal=True)
    arrays, directions = draw(problem, dtype)

    def plain_attention(*x):
        return plain.attention(*x, is_causal=problem.is_causal)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        mine = plain.orders(attend(problem, None), arrays, directions)
        theirs = plain.orders(plain_attention, arrays, directions)
    exact = plain.exact_orders(plain_attention, arrays, directions)
    for name in exact:
        assert mine[name].dtype == dtype
        assert plain.error(mine[name], exact[name]) <= 1.5 * plain.error(theirs[name], exact[name]), name
