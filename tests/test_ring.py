"""Attention over keys that go round the devices: the whole sequence's results, in the memory of one part."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jttt
from jttt import parts
from tests import devices, plain
from tests.plain import Problem

PROBLEM = Problem(B=2, T=64, S=64, N=4, K=2, H=8, E=12)
SEQUENCE = P(None, "seq")

# What a window of nine keys to the left and three to the right shows.
_DISTANCE = np.arange(64) - np.arange(64)[:, None]
WINDOW = (-9 <= _DISTANCE) & (_DISTANCE <= 3)

# Arguments of ring attention, and of the plain implementation.
CASES = {
    "full": ({}, {}),
    "causal": (dict(is_causal=True), dict(is_causal=True)),
    "window": (dict(local_window_size=(9, 3)), dict(visible=WINDOW)),
}


@functools.cache
def exact_orders(case):
    arrays, directions = PROBLEM.draw(np.float64)
    return plain.exact_orders(lambda *x: plain.joined(*plain.attention(*x, **CASES[case][1])), arrays, directions)


def orders(function, weights, slopes):
    """Order 0, 1 and 2 of attention inside a `jax.shard_map`, by name, for losses that are sums over the devices."""

    def loss(arrays, weights):
        output = function(*arrays)
        return jnp.sum(weights * jnp.sin(output.astype(weights.dtype))), output

    def meta(arrays, weights, slopes):
        first, output = jax.grad(loss, has_aux=True)(arrays, weights)
        return sum(jnp.sum(slope * jnp.sin(g.astype(slope.dtype))) for slope, g in zip(slopes, first, strict=True)), (
            output, first)

    def all_orders(arrays):
        second, (output, first) = jax.grad(meta, has_aux=True)(arrays, weights, slopes)
        return output, first, second

    return all_orders


def ring_orders(arrays, directions, count, layout, on=None, **options):
    """`plain.orders`, over `count` devices; simulated ones, unless others are given."""
    move, back = (functools.partial(f, devices=count) if layout == "zigzag" else (lambda x: x)
                  for f in (jttt.to_zigzag, jttt.from_zigzag))

    def local(arrays, directions):
        attention = functools.partial(jttt.ring_attention, axis_name="seq", layout=layout, return_residual=True)
        return orders(lambda *x: plain.joined(*attention(*x, **options)), directions[0], directions[1:])(arrays)

    mesh = devices.mesh(seq=count) if on is None else jax.make_mesh(
        (count,), ("seq",), axis_types=(AxisType.Auto,), devices=on)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=SEQUENCE, out_specs=SEQUENCE)
    moved = [[move(np.asarray(x)) for x in xs] for xs in (arrays, directions)]
    results, collectives = devices.compiled(mapped, *jax.device_get(moved))
    output, first, second = jax.tree.map(back, results)
    names = ("query", "key", "value")
    return ({"output": output} | {f"d_{name}": x for name, x in zip(names, first, strict=True)}
            | {f"g_{name}": x for name, x in zip(names, second, strict=True)}), collectives


@pytest.mark.parametrize(("case", "count", "layout"), [
    ("causal", 1, "zigzag"), ("full", 2, "contiguous"), ("causal", 4, "contiguous"), ("window", 4, "zigzag"),
    ("causal", 8, "zigzag"), ("window", 8, "contiguous"),
])
def test_each_order_is_that_of_the_whole_sequence(case, count, layout, float64):
    arrays, directions = PROBLEM.draw(np.float64)
    results, collectives = ring_orders(arrays, directions, count, layout, **CASES[case][0])
    plain.assert_close(results, exact_orders(case), 1e-12)
    assert set(collectives) <= {"collective-permute"}


@pytest.mark.parametrize(("count", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_heads_that_go_round_one_after_the_other(count, layout, float64, monkeypatch):
    monkeypatch.setattr(parts, "_ROUND", 1)
    arrays, directions = PROBLEM.draw(np.float64)
    results, collectives = ring_orders(arrays, directions, count, layout, is_causal=True)
    plain.assert_close(results, exact_orders("causal"), 1e-12)
    assert set(collectives) == {"collective-permute"}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_all_heads_go_at_once_where_others_may_be_elsewhere(kind, size, monkeypatch):
    """In a `jax.shard_map` over some axes of a mesh, the other one dividing heads."""
    arrays, _ = PROBLEM.draw(np.float32)
    expected = jttt.dot_product_attention(*arrays, is_causal=True)
    monkeypatch.setattr(parts, "_ROUND", 1)
    mesh = jax.make_mesh((size, 2), ("model", "seq"), axis_types=(kind, kind), devices=jax.devices()[:2 * size])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, P(None, "seq", "model"))) for x in arrays]
        mapped = jax.shard_map(functools.partial(jttt.ring_attention, axis_name="seq", is_causal=True),
                               in_specs=SEQUENCE, out_specs=SEQUENCE, axis_names={"seq"})
        results, collectives = devices.compiled(mapped, *placed)
    np.testing.assert_allclose(results, expected, atol=1e-5)
    assert set(collectives) == {"collective-permute"}


@pytest.mark.parametrize("order", [0, 1, 2])
def test_memory_of_many_keys_is_that_of_some_heads(order, monkeypatch):
    at_once, apart = [], []
    for measured, size in ((at_once, 2**24), (apart, 2**16)):
        monkeypatch.setattr(parts, "_ROUND", size)
        measured.append(temporary_bytes(order, count=2, length=1024, heads=8))
    assert apart[0] < (0.4, 0.6, 0.7)[order] * at_once[0], (apart, at_once)


def test_parts_of_half_precision_are_added_up_in_float32():
    """The errors over eight devices are those of one."""
    arrays, directions = PROBLEM.draw(jnp.bfloat16)
    exact = plain.exact_orders(lambda *x: plain.joined(*plain.attention(*x)), arrays, directions)
    one, eight = (ring_orders(arrays, directions, count, "contiguous")[0] for count in (1, 8))
    for name, x in exact.items():
        assert plain.error(eight[name], x) <= 1.3 * plain.error(one[name], x), name


def test_lengths_and_segments(float64):
    arrays, _ = PROBLEM.draw(np.float64)
    generator = np.random.default_rng(0)
    segments = np.sort(generator.integers(0, 4, (2, 64), np.int32))
    lengths = np.array([50, 33], np.int32)

    def local(arrays, segments, lengths):
        return jttt.ring_attention(*arrays, axis_name="seq", is_causal=True, key_value_seq_lengths=lengths,
                                   query_segment_ids=segments, key_value_segment_ids=segments)

    mapped = jax.shard_map(local, mesh=devices.mesh(seq=4), in_specs=(SEQUENCE, SEQUENCE, P()), out_specs=SEQUENCE)
    expected = jttt.dot_product_attention(*arrays, is_causal=True, key_value_seq_lengths=lengths,
                                          query_segment_ids=segments, key_value_segment_ids=segments)
    np.testing.assert_allclose(jax.jit(mapped)(arrays, segments, lengths), expected, atol=1e-12)


def test_beside_divided_batch_and_heads():
    arrays, _ = PROBLEM.draw(np.float32)
    spec = P("data", "seq", "model")
    mapped = jax.shard_map(functools.partial(jttt.ring_attention, axis_name="seq", is_causal=True, logits_soft_cap=2.0,
                                             scale=0.5), mesh=devices.mesh(data=2, seq=2, model=2),
                           in_specs=spec, out_specs=spec)
    results, collectives = devices.compiled(mapped, *arrays)
    assert set(collectives) == {"collective-permute"}
    expected = jttt.dot_product_attention(*arrays, is_causal=True, logits_soft_cap=2.0, scale=0.5)
    np.testing.assert_allclose(results, expected, atol=1e-5)


def test_differentiated_from_outside(float64):
    """Of a shard_map as a function of whole arrays, to order two."""
    arrays, directions = PROBLEM.draw(np.float64)

    def local(*x):
        return plain.joined(*jttt.ring_attention(*x, axis_name="seq", is_causal=True, return_residual=True))

    mapped = jax.shard_map(local, mesh=devices.mesh(seq=4), in_specs=SEQUENCE, out_specs=SEQUENCE)
    plain.assert_close(plain.orders(mapped, arrays, directions), exact_orders("causal"), 1e-12)


def test_forward_mode(float64):
    arrays, (_, *tangents) = PROBLEM.draw(np.float64)
    mapped = jax.shard_map(functools.partial(jttt.ring_attention, axis_name="seq", is_causal=True),
                           mesh=devices.mesh(seq=4), in_specs=SEQUENCE, out_specs=SEQUENCE)

    def whole(*x):
        return plain.attention(*x, is_causal=True)[0]

    tangent, expected = (jax.jit(functools.partial(jax.jvp, function))(tuple(arrays), tuple(tangents))[1]
                         for function in (mapped, whole))
    np.testing.assert_allclose(tangent, expected, atol=1e-12)


def test_kernels_run_over_parts():
    """The kernels themselves, in Triton's interpreter, at every order."""
    if jax.default_backend() == "gpu":
        pytest.skip("the interpreter runs on a machine without a GPU")
    arrays, directions = Problem(B=1, T=32, S=32, N=1, K=1, H=16).draw(np.float32)
    results, _ = ring_orders(arrays, directions, 2, "zigzag", is_causal=True, implementation="triton")
    plain.assert_close(results, plain.exact_orders(
        lambda *x: plain.joined(*plain.attention(*x, is_causal=True)), arrays, directions), 1e-5)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_memory_of_a_device_does_not_grow_with_their_number(order):
    """At a fixed length on each device, so that of the whole sequence grows."""
    two, four, eight = (temporary_bytes(order, count, length=64 * count, heads=1) for count in (2, 4, 8))
    # Two devices are one round, which the compiler unrolls; from there on it is a loop.
    assert eight <= 1.01 * four and eight <= 1.1 * two, (two, four, eight)


def temporary_bytes(order, count, length, heads):
    """What a device sets aside for attention, its gradient or its meta-gradient."""

    def attention(*x):
        return jttt.ring_attention(*x, axis_name="seq", is_causal=True, layout="zigzag")

    def gradient(*x):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), (0, 1, 2))(*x)

    def meta_gradient(*x):
        return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in gradient(*x)), (0, 1, 2))(*x)

    x = jax.ShapeDtypeStruct((1, length, heads, 32), jnp.float32)
    function = (attention, gradient, meta_gradient)[order]
    mapped = jax.shard_map(function, mesh=devices.mesh(seq=count), in_specs=SEQUENCE, out_specs=SEQUENCE)
    return jax.jit(mapped).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_zigzag_gives_each_device_both_ends():
    moved = jttt.to_zigzag(np.arange(8), devices=2, axis=0)
    np.testing.assert_array_equal(moved, [0, 1, 6, 7, 2, 3, 4, 5])
    x = np.random.default_rng(0).standard_normal((2, 3, 24))
    np.testing.assert_array_equal(jttt.from_zigzag(jttt.to_zigzag(x, devices=4, axis=-1), devices=4, axis=-1),
                                  x.astype(jnp.asarray(x).dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_kernels_over_all_gpus(layout):
    """On one GPU too, where the ring is of one device."""
    count = len(jax.devices())
    arrays, directions = Problem(B=1, T=256 * count, S=256 * count, N=4, K=2, H=64).draw(jnp.bfloat16)
    results, _ = ring_orders(arrays, directions, count, layout, jax.devices(), is_causal=True, implementation="triton")
    plain.assert_close(results, plain.exact_orders(
        lambda *x: plain.joined(*plain.attention(*x, is_causal=True)), arrays, directions), 2e-2)


# Errors.


def ring(query, key=None, *, count=2, **options):
    key = query if key is None else key
    mapped = jax.shard_map(functools.partial(jttt.ring_attention, **dict(axis_name="seq") | options),
                           mesh=devices.mesh(seq=count), in_specs=SEQUENCE, out_specs=SEQUENCE)
    return mapped(query, key, key)


@pytest.mark.parametrize(("length", "key_length", "options", "message"), [
    (8, 8, dict(layout="striped"), "layout was 'striped': expected 'contiguous' or 'zigzag'"),
    (6, 6, dict(layout="zigzag"), "query has length 3 on each device and layout was 'zigzag': expected an even length"),
    (8, 16, dict(is_causal=True), "query has length 4 on each device and key 8: expected the same"),
    (8, 8, dict(axis_name="data"), "axis_name was 'data': expected the name of an axis"),
    (8, 8, dict(logits_soft_cap=-1.0), "logits_soft_cap was -1.0"),
])
def test_errors_name_the_argument(length, key_length, options, message):
    with pytest.raises(ValueError, match=message):
        ring(jnp.ones((1, length, 1, 4)), jnp.ones((1, key_length, 1, 4)), **options)


def test_outside_of_a_shard_map():
    x = jnp.ones((1, 4, 1, 4))
    with pytest.raises(ValueError, match="axis_name was 'seq'"):
        jttt.ring_attention(x, x, x, axis_name="seq")


def test_the_axis_of_a_vmap_has_no_devices():
    x = jnp.ones((2, 4, 1, 4))
    with pytest.raises(ValueError, match="axis_name was 'seq': expected the name of an axis of a surrounding"):
        jax.vmap(lambda x: jttt.ring_attention(x, x, x, axis_name="seq"), axis_name="seq")(x)


def test_lengths_that_zigzag_cannot_cut():
    with pytest.raises(ValueError, match="x has length 6 along axis 1: expected a multiple of 2 · devices = 4"):
        jttt.to_zigzag(jnp.ones((1, 6)), devices=2)


def test_order_three_is_refused():
    x = jnp.ones((1, 4, 1, 4))

    def third(x):
        f = lambda x: jnp.sum(ring(x) ** 2)  # noqa: E731
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x) ** 2))(x)

    with pytest.raises(NotImplementedError, match="ring_attention was differentiated beyond what its passes"):
        jax.jit(third)(x)
