"""Attention of a chunk to itself and a cache, and the merging of attention to disjoint keys."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests import jaxprs, plain
from tests.plain import Problem

pytestmark = pytest.mark.usefixtures("float64", "cheap_compilation")


def chunked(query, key, value, *, chunk: int, window: int, **options) -> jax.Array:
    """Attention over a sequence `[..., T, N, H]`, a chunk at a time; the last may be shorter."""
    batch = key.shape[0] if key.ndim == 4 else None
    cache = jttt.empty_cache(window, *key.shape[-2:], key.dtype, value_width=value.shape[-1], batch=batch)
    outputs = []
    for begin in range(0, query.shape[-3], chunk):
        here = (..., slice(begin, begin + chunk), slice(None), slice(None))
        output, cache = jttt.chunk_attention(query[here], key[here], value[here], cache, **options)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=-3)


def windowed(query, key, value, *, window: int, **options) -> jax.Array:
    """The same in plain JAX over the whole sequence."""
    t, s = np.arange(query.shape[-3])[:, None], np.arange(key.shape[-3])
    return plain.attention(query, key, value, visible=(s <= t) & (s > t - window), **options)[0]


def drawn(problem: Problem, dtype: str = "float64") -> tuple[list, list]:
    """Arrays, and directions for `plain.orders` of an output alone."""
    arrays, (weights, *slopes) = problem.draw(dtype)
    return arrays, [weights[..., :-1], *slopes]


@pytest.mark.parametrize(("T", "chunk", "window"), [
    (12, 4, 6), (12, 6, 4), (3, 1, 2), (7, 7, 7), (5, 3, 100),
])
def test_chunks_equal_the_whole_sequence_to_second_order(T, chunk, window):
    arrays, directions = drawn(Problem(T=T, S=T, N=4, K=2, H=5, E=3))
    ours = plain.orders(functools.partial(chunked, chunk=chunk, window=window), arrays, directions)
    exact = plain.orders(functools.partial(windowed, window=window), arrays, directions)
    plain.assert_close(ours, exact, 1e-12)


def test_a_batch_in_one_call_or_under_vmap():
    arrays, directions = drawn(Problem(B=3, T=8, S=8, N=2, K=1, H=4))
    exact = plain.orders(functools.partial(windowed, window=6, scale=0.3), arrays, directions)
    batched = functools.partial(chunked, chunk=4, window=6, scale=0.3)
    plain.assert_close(plain.orders(batched, arrays, directions), exact, 1e-12)
    plain.assert_close(plain.orders(jax.vmap(batched), arrays, directions), exact, 1e-12)


@pytest.mark.oldest
def test_a_traced_length_under_scan():
    T, chunk, window = 24, 4, 8
    arrays, directions = drawn(Problem(T=T, S=T, N=2, K=2, H=4))

    def scanned(*arrays):
        def step(cache, chunks):
            output, cache = jttt.chunk_attention(*chunks, cache)
            return cache, output

        cache = jttt.empty_cache(window, 2, 4, arrays[1].dtype)
        chunks = [x.reshape(T // chunk, chunk, *x.shape[1:]) for x in arrays]
        return jax.lax.scan(step, cache, chunks)[1].reshape(T, *arrays[2].shape[1:])

    exact = plain.orders(functools.partial(windowed, window=window), arrays, directions)
    plain.assert_close(plain.orders(scanned, arrays, directions), exact, 1e-12)


def test_sequences_of_one_batch_may_have_read_more_or_less():
    query, key, value = drawn(Problem(B=2, T=3, S=3, N=1, K=1, H=4))[0]
    held = np.random.default_rng(1).standard_normal((2, 2, 5, 1, 4))
    cache = jttt.KeyValueCache(*map(jnp.asarray, held), jnp.array([1, 5], jnp.int32))
    output, cache = jttt.chunk_attention(query, key, value, cache)
    for b, length in enumerate([1, 5]):
        keys, values = (np.concatenate([x[b, 5 - length:], y[b]]) for x, y in zip(held, (key, value), strict=True))
        t, s = np.arange(3)[:, None] + length, np.arange(3 + length)
        exact = plain.attention(query[b], keys, values, visible=(s <= t) & (s > t - 5))[0]
        np.testing.assert_allclose(output[b], exact, atol=1e-12)
    assert cache.length.tolist() == [4, 5]


@pytest.mark.parametrize("read", [0, 1, 5, 6, 13])
def test_decoding_in_a_buffer_equals_the_chunk(read):
    query, key, value = drawn(Problem(T=19, S=19, N=2, K=1, H=4))[0]
    exact = windowed(query, key, value, window=7)
    cache = jttt.empty_cache(7, 1, 4, key.dtype).append(jnp.asarray(key[:read]), jnp.asarray(value[:read]))
    decode = jax.jit(lambda at, *arrays: jttt.chunk_attention(*arrays, cache, query_offset=at)[0])
    for t in range(6):
        later = np.arange(6)[:, None, None] > t
        buffers = [np.where(later, 1e3, x[read:read + 6]) for x in (key, value)]
        output = decode(np.int32(t), query[read + t:read + t + 1], *buffers)
        np.testing.assert_allclose(output[0], exact[read + t], atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kernels(dtype):
    with jax.enable_x64(False):
        arrays, directions = drawn(Problem(T=24, S=24, N=2, K=1, H=16), dtype)
        ours = plain.orders(functools.partial(chunked, chunk=8, window=16, implementation="triton"), arrays, directions)
    exact = plain.exact_orders(functools.partial(windowed, window=16), arrays, directions)
    plain.assert_close(ours, exact, {"float16": 6e-3, "float32": 1e-5}[dtype])


# What nobody asks for is not computed.


def test_a_cache_that_nobody_differentiates_costs_no_gradient():
    """Orders one and two for the chunk alone: no pass makes a gradient of the cache, or reads a direction of it."""
    arrays, _ = drawn(Problem(T=4, S=4, N=1, K=1, H=4))
    cache = jttt.empty_cache(8, 1, 4, jnp.float64)._replace(length=jnp.int32(6))

    def loss(*arrays):
        return jnp.sum(jnp.sin(jttt.chunk_attention(*arrays, cache)[0]))

    def meta(*arrays):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*arrays))

    for order in (jax.grad(loss, (0, 1, 2)), jax.grad(meta, (0, 1, 2))):
        of_cache = [equation for equation in jaxprs.passes(order, *arrays)
                    if jaxprs.operands(equation)["key"].shape[-3] == cache.window]
        assert of_cache
        for equation in of_cache:
            assert not {"d_key", "d_value", "g_key", "g_value"} & set(equation.params["wanted"]), equation
            assert not {"t_key", "t_value"} & set(equation.params["operands"]), equation


def test_an_outer_gradient_of_the_cache_passes_through_an_inner_one_that_has_none():
    """As in test-time training: the inner gradient leaves the cache out, the outer one differentiates it."""
    arrays, _ = drawn(Problem(T=4, S=4, N=1, K=1, H=4))
    cache = jttt.empty_cache(8, 1, 4, jnp.float64)._replace(length=jnp.int32(6))

    def inner(query, cache):
        return jnp.sum(jnp.sin(jttt.chunk_attention(query, *arrays[1:], cache)[0]))

    def outer(query, key, value):
        return jnp.sum(jnp.sin(jax.grad(inner)(query, cache._replace(key=key, value=value))))

    of_cache = [equation for equation in jaxprs.passes(jax.grad(outer, (0, 1, 2)), arrays[0], cache.key, cache.value)
                if jaxprs.operands(equation)["key"].shape[-3] == cache.window]
    wanted = [(equation.params["name"], set(equation.params["wanted"])) for equation in of_cache]
    first = next(names for name, names in wanted if name == "backward")
    assert first == {"d_query"}
    assert any({"g_key", "g_value"} <= names for name, names in wanted if name == "double_backward")
    assert not any({"t_key", "t_value"} & set(equation.params["operands"]) for equation in of_cache)


# Merging.


def parts_of(arrays, splits):
    """Attention to each stretch of keys between `splits`, as `merge` takes it."""
    query, key, value = arrays
    return [jttt.dot_product_attention(query, key[a:b], value[a:b], return_residual=True)
            for a, b in itertools.pairwise(splits)]


@pytest.mark.parametrize("splits", [(0, 9), (0, 2, 9), (0, 1, 4, 9)], ids=str)
def test_merged_parts_equal_the_whole(splits):
    arrays, directions = Problem(T=5, S=9, N=2, K=1, H=4).draw("float64")
    ours = plain.orders(lambda *x: plain.joined(*jttt.merge(*parts_of(x, splits))), arrays, directions)
    exact = plain.orders(lambda *x: plain.joined(*plain.attention(*x)), arrays, directions)
    plain.assert_close(ours, exact, 1e-12)


def test_rows_that_see_nothing_in_some_part_or_in_all():
    """Row 0 sees the first part alone, row 1 the second alone, row 2 nothing, row 3 both."""
    arrays, directions = Problem(T=4, S=6, N=1, K=1, H=4).draw("float64")
    ends = [np.array([3, 0, 0, 3], np.int32), np.array([0, 3, 0, 3], np.int32)]

    def merged(query, key, value):
        parts = [jttt.dot_product_attention(query, key[part], value[part], key_end=end, return_residual=True)
                 for part, end in zip((slice(0, 3), slice(3, 6)), ends, strict=True)]
        output, lse = jttt.merge(*parts)
        # An infinity has no place in the loss; its row must still reach every derivative without a NaN.
        return plain.joined(output, jnp.where(jnp.isfinite(lse), lse, 0.0))

    visible = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0] * 6, [1] * 6], bool)
    seeing = [0, 1, 3]
    ours = plain.orders(merged, arrays, directions)
    assert all(np.isfinite(x).all() for x in ours.values())
    query, key, value = arrays
    weights, t_query, *slopes = directions
    exact = plain.orders(lambda *x: plain.joined(*plain.attention(*x, visible=visible[seeing])),
                         [query[seeing], key, value], [weights[seeing], t_query[seeing], *slopes])
    for name in exact:
        mine = ours[name][np.array(seeing)] if name in ("output", "d_query", "g_query") else ours[name]
        np.testing.assert_allclose(mine, exact[name], atol=1e-12, err_msg=name)
    output, lse = jttt.merge(*[jttt.dot_product_attention(query, key, value, key_end=0, return_residual=True)] * 2)
    assert (np.asarray(output) == 0).all() and (np.asarray(lse) == -np.inf).all()


def test_log_sum_exps_of_any_size_merge():
    for shift in (-1e4, 0.0, 1e4):
        output, lse = jttt.merge(*((jnp.full((1, 1, 1), x), jnp.full((1, 1), shift)) for x in (1.0, 3.0)))
        assert float(output.squeeze()) == pytest.approx(2.0)
        assert float(lse.squeeze()) == pytest.approx(shift + np.log(2))


# Errors.


@pytest.mark.parametrize(("changes", "message"), [
    (dict(key=jnp.zeros((8, 2, 4))), r"cache.key has shape \[8, 2, 4\] and key \[4, 1, 4\]: expected the same but"),
    (dict(value=jnp.zeros((8, 1, 3))), r"cache.value has shape \[8, 1, 3\] and value \[4, 1, 4\]"),
    (dict(key=jnp.zeros((1, 8, 1, 4)), value=jnp.zeros((1, 8, 1, 4))), r"cache.key has shape \[1, 8, 1, 4\]"),
    (dict(value=jnp.zeros((7, 1, 4))), r"cache.value has shape \[7, 1, 4\] and cache.key \[8, 1, 4\]"),
    (dict(key=jnp.zeros((8, 1, 4), "float16")), "cache.key has dtype float16 and key float32"),
    (dict(length=jnp.zeros((3,), "int32")), r"cache.length has shape \[3\] and dtype int32: expected an int32 scalar"),
    (dict(length=jnp.zeros((), "float32")), "cache.length has shape .* and dtype float32"),
    (dict(length=4.0), "cache.length has shape .* and dtype float"),
])
def test_a_cache_that_does_not_fit(changes, message):
    cache = jttt.empty_cache(8, 1, 4, "float32")._replace(**changes)
    with pytest.raises((ValueError, TypeError), match=message):
        jttt.chunk_attention(*[jnp.zeros((4, 1, 4), "float32")] * 3, cache)


def test_a_cache_of_nothing():
    with pytest.raises(ValueError, match="window was 0: expected at least 1"):
        jttt.empty_cache(0, 1, 4, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize(("chunk", "window"), [(256, 1024), (256, 300)])
def test_bfloat16_errors_on_a_gpu_are_near_those_of_plain_formulas(chunk, window):
    with jax.enable_x64(False):
        arrays, directions = drawn(Problem(T=1024, S=1024, N=4, K=2, H=64), "bfloat16")
        ours = plain.orders(functools.partial(chunked, chunk=chunk, window=window, implementation="triton"),
                            arrays, directions)
        theirs = plain.orders(functools.partial(
            jttt.dot_product_attention, is_causal=True, local_window_size=(window - 1, 0), implementation="xla"),
            arrays, directions)
    exact = plain.exact_orders(functools.partial(windowed, window=window), arrays, directions)
    errors = {name: (plain.error(ours[name], exact[name]), plain.error(theirs[name], exact[name])) for name in exact}
    print(" ".join(f"{name} {mine:.1e}/{other:.1e}" for name, (mine, other) in errors.items()))
    # Two parts are rounded, and their sum: √2 of one rounding.
    assert all(mine <= 2 * other + 1e-6 for mine, other in errors.values()), errors
