"""The kernels for Hopper, whose own text runs on the host (`tests/gluon.py`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from jttt.kernels import blocks, hopper
from jttt.kernels.config import Blocks
from tests import dense, gluon, plain
from tests.dense import Sizes
from tests.plain import Problem

attention = functools.partial(jttt.dot_product_attention, implementation="triton", return_residual=True)

# In roundings of the dtype, the largest relative error of an array. Some of what is rounded on the way, such as the
# gradients that order two starts from, is larger than what comes of it.
ROUNDINGS = 8

SIZES = Sizes(B=2, T=24, S=40, N=2, K=1, H=8, E=16)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)


def check(results, exact, dtype):
    rounding = float(jnp.finfo(dtype).eps) / 2
    errors = {name: round(plain.error(results[name], x) / rounding, 2) for name, x in exact.items()}
    assert all(x <= ROUNDINGS for x in errors.values()), errors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("problem", [
    Problem(T=1, S=17, N=1, K=1, H=8, is_causal=True),
    Problem(T=33, S=49, N=4, K=2, H=16, E=8, B=2, is_causal=True),
    Problem(T=50, S=33, N=2, K=2, H=24, B=1),
], ids=str)
def test_every_order(problem, stages, dtype):
    arrays, directions = problem.draw(dtype)
    with gluon.on_host(Blocks(16, 16, 4, stages)) as taken:
        results = plain.orders(lambda *x: plain.joined(*attention(*x, is_causal=problem.is_causal)), arrays, directions)
    check(results, plain.exact_orders(
        lambda *x: plain.joined(*plain.attention(*x, is_causal=problem.is_causal)), arrays, directions), dtype)
    assert taken == {kernel.__name__ for kernel, _ in hopper.KERNELS.values()}


@pytest.mark.parametrize("width", [64, 96, 128])
def test_blocks_of_the_table(width):
    sizes = Sizes(B=1, T=300, S=400, N=1, K=1, H=width, E=width)
    arguments = dense.floats(sizes.draw() | dict(local_window_size=(170, 0), query_offset=100), jnp.bfloat16)
    with gluon.on_host():
        check(dense.orders(attention, arguments), dense.exact_orders(arguments), jnp.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_hides_keys_or_changes_scores(kind):
    arguments = dense.floats(SIZES.draw() | KINDS[kind], np.float16)
    with gluon.on_host(Blocks(16, 16, 4, 2)):
        check(dense.orders(attention, arguments), dense.exact_orders(arguments), np.float16)


@pytest.mark.parametrize("height", [12, 100])
def test_a_high_bias_of_keys_past_the_last_query(height):
    """A block of queries that is not full: nothing of what lies past its end is infinite, whatever the bias."""
    bias = np.full((1, 1, 1, SIZES.S), height, np.float32)
    arguments = dense.floats(SIZES.draw() | dict(bias=bias), np.float16)
    with gluon.on_host(Blocks(16, 16, 4, 2)):
        check(dense.orders(attention, arguments), dense.exact_orders(arguments), np.float16)


@pytest.mark.parametrize("kind", ["causal_window", "key_lengths"])
def test_programs_that_share_the_work_of_a_block(kind, monkeypatch):
    monkeypatch.setattr(blocks, "shares", lambda *_: 3)
    arguments = dense.floats(SIZES.draw() | KINDS[kind], np.float16)
    with gluon.on_host(Blocks(8, 8, 4, 2)):
        check(dense.orders(attention, arguments), dense.exact_orders(arguments), np.float16)


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("query", "value")], ids=str)
def test_some_gradients_alone(wanted):
    """Products that nobody needs are neither made nor waited for."""
    arguments = dense.floats(SIZES.draw() | dict(is_causal=True), np.float16)
    with gluon.on_host(Blocks(16, 8, 4, 2)):
        check(dense.orders(attention, arguments, wanted), dense.exact_orders(arguments, wanted), np.float16)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_the_tangent_along_one_input(moved):
    arrays, directions = Problem(T=33, S=49, N=2, K=1, H=16, B=1, is_causal=True).draw("bfloat16")
    tangent = directions[1 + moved].astype("bfloat16")

    def along(function, tangent, *arrays):
        return jax.jvp(lambda x: function(*arrays[:moved], x, *arrays[moved + 1:], is_causal=True)[0],
                       (arrays[moved],), (tangent,))[1]

    with gluon.on_host(Blocks(16, 16, 4, 2)):
        mine = jax.jit(functools.partial(along, attention))(tangent, *arrays)
    with jax.enable_x64(True):
        exact = along(plain.attention, *(jnp.asarray(np.asarray(x, np.float64)) for x in (tangent, *arrays)))
    check({"tangent": mine}, {"tangent": exact}, "bfloat16")
