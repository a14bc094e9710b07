"""Arguments at the ends of their ranges, and results that callers turn into infinities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests.test_kernels import blocks_of

BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])

LARGEST = 2**31 - 1


def draw(T=5, S=6, N=2, H=8, B=2):
    generator = np.random.default_rng(0)
    return [generator.standard_normal((B, length, N, H), np.float32) for length in (T, S, S)]


@BOTH
@pytest.mark.parametrize("limits", [
    dict(local_window_size=LARGEST),
    dict(local_window_size=(2**40, 2**40)), dict(is_causal=True, query_offset=LARGEST),
    dict(is_causal=True, query_offset=2**40), dict(is_causal=True, query_offset=np.int32(LARGEST)),
    dict(is_causal=True, query_offset=jnp.array([LARGEST, LARGEST - 3], jnp.int32)),
    dict(local_window_size=(LARGEST, LARGEST), query_offset=jnp.int32(-9)),
], ids=str)
def test_limits_that_hide_nothing(limits, implementation):
    arrays = draw()
    attention = functools.partial(jttt.dot_product_attention, implementation=implementation)
    np.testing.assert_allclose(attention(*arrays, **limits), attention(*arrays), rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("offset", [-LARGEST, jnp.int32(-LARGEST)], ids=["int", "array"])
def test_limits_and_offsets_add_up_exactly(offset, implementation):
    """A window of that many to the right, moved as far to the left, ends at the query itself."""
    arrays = draw()
    attention = functools.partial(jttt.dot_product_attention, *arrays, implementation=implementation)
    moved = attention(local_window_size=(0, LARGEST), query_offset=offset)
    np.testing.assert_allclose(moved, attention(is_causal=True), rtol=1e-6, atol=1e-6)


@BOTH
def test_limits_that_hide_everything(implementation):
    output, lse = jttt.dot_product_attention(*draw(), is_causal=True, query_offset=jnp.int32(-LARGEST),
                                             implementation=implementation, return_residual=True)
    assert not output.any()
    assert np.isneginf(lse).all()


@BOTH
def test_a_row_that_sees_nothing_has_no_gradient_whatever_is_made_of_it(implementation):
    arrays = draw()

    def loss(*arrays):
        output, lse = jttt.dot_product_attention(
            *arrays, query_seq_lengths=[3, 4], implementation=implementation, return_residual=True)
        directions = output / jnp.linalg.norm(output, axis=-1, keepdims=True)  # 0 / 0 in padding
        return jnp.sum(directions[:, :3]) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse**2))

    for x in jax.grad(loss, (0, 1, 2))(*arrays):
        assert np.isfinite(x).all()


@BOTH
@pytest.mark.parametrize("filler", [-1e9, -1e30, float(np.finfo(np.float32).min)])
def test_a_row_whose_bias_is_one_huge_number_is_as_without_it(filler, implementation):
    """Then every score is that number, and the row averages value."""
    query, key, value = draw()
    bias = np.zeros((5, 6), np.float32)
    bias[1] = filler

    def gradients(query, bias):
        def loss(*arrays):
            output = jttt.dot_product_attention(*arrays, bias, implementation=implementation)
            return jnp.sum(jnp.sin(output[:, 1]))

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    # Scores of a query of zeros are all zero; its key gradient is zero in both.
    flat = query * (np.arange(5) != 1)[:, None, None].astype(np.float32)
    _, d_key, d_value = gradients(flat, bias)
    _, d_key_without, d_value_without = gradients(flat, np.zeros_like(bias))
    np.testing.assert_allclose(d_value, d_value_without, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_key, d_key_without, atol=1e-6)


def test_the_gradient_of_a_bias_does_not_visit_hidden_tiles():
    """What lies in them is NaN here, which a visit would spread."""
    query, key, value = draw(T=48, S=48, N=1, B=1)
    key[:, 32:], value[:, 32:] = np.nan, np.nan
    bias = np.zeros((48, 48), np.float32)

    def loss(bias, **hidden):
        return jnp.sum(jttt.dot_product_attention(query, key, value, bias, implementation="triton", **hidden)[:, :32])

    with blocks_of(16, 16) as taken:
        for hidden in (dict(is_causal=True), dict(key_value_seq_lengths=[32])):
            def inner(bias, hidden=hidden):
                return jnp.sum(jnp.sin(jax.grad(functools.partial(loss, **hidden))(bias)[:32, :32]))

            first = jax.jit(jax.grad(functools.partial(loss, **hidden)))(bias)
            second = jax.jit(jax.grad(inner))(bias)
            assert np.isfinite(first[:32, :32]).all()
            assert np.isfinite(second[:32, :32]).all()
    assert {"d_bias_kernel", "g_bias_kernel"} <= taken


def test_numpy_arrays_that_vmap_maps_under_jit():
    query, keys, _ = draw(B=3)
    mapped = jax.jit(lambda query: jax.vmap(lambda key: jttt.dot_product_attention(query[None], key[None], key[None]))(
        keys))(query[0])
    looped = [jttt.dot_product_attention(query[:1], key[None], key[None]) for key in keys]
    np.testing.assert_allclose(mapped, np.stack(looped), rtol=1e-6, atol=1e-6)


def test_python_integers_and_wide_sinks_where_float64_is_on():
    arrays = draw()
    attention = functools.partial(jttt.dot_product_attention, *arrays)
    with jax.enable_x64(True):
        narrow = attention(key_end=5, key_value_seq_lengths=[3, 4], sinks=np.ones(2, np.float32))
        for implementation in ("xla", "triton"):
            wide = attention(key_end=5, key_value_seq_lengths=[3, 4], sinks=np.ones(2), implementation=implementation)
            assert wide.dtype == jnp.float32
            np.testing.assert_allclose(wide, narrow, rtol=1e-6, atol=1e-6)
