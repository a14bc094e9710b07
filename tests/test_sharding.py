"""Sharded arrays under jit: each device runs the passes on its own part, and only sums are communicated."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jttt
from jttt import passes
from jttt.partition import PartitioningWarning
from tests import dense, devices, plain
from tests.dense import Sizes

SIZES = Sizes(B=2, T=32, S=48, N=8, K=4, H=8, E=12)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)
TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

attention = functools.partial(jttt.dot_product_attention, return_residual=True)


def sharded_orders(arguments, mesh, function=attention, **letters):
    """Orders zero to two of sharded arguments, and the collectives of the program that makes them all."""
    placed = devices.put(arguments, mesh, **letters)
    arrays = {name: x for name, x in placed.items() if hasattr(x, "dtype")}
    static = {name: x for name, x in placed.items() if name not in arrays}
    with jax.set_mesh(mesh):
        return devices.compiled(lambda arrays: dense.orders(function, arrays | static), arrays)


def assert_orders(arguments, mesh, **letters):
    """Sharded orders zero to two are those of float64; returns the collectives."""
    results, collectives = sharded_orders(arguments, mesh, **letters)
    plain.assert_close(results, dense.exact_orders(arguments), 1e-5)
    return collectives


@pytest.mark.parametrize(("kind", "axis_type"), [
    *((kind, AxisType.Auto) for kind in ("none", "traced_offset", "documents", "mask_of_each")),
    *((kind, AxisType.Explicit) for kind in ("causal_window", "key_ranges"))], ids=str)
def test_batch_and_heads_are_divided_without_communication(kind, axis_type):
    arguments = SIZES.draw() | KINDS.get(kind, {})
    results, collectives = sharded_orders(arguments, devices.mesh(axis_type, data=2, model=4),
                                          B="data", N="model", K="model")
    assert collectives == {}
    plain.assert_close(results, dense.exact_orders(arguments), 1e-5)
    for name in ("output", "d_query", "d_key", "d_value", "g_query", "g_key", "g_value"):
        assert results[name].sharding.spec[:3] == ("data", None, "model"), name


def test_each_device_runs_one_pass_on_its_own_part(monkeypatch):
    ran = []

    def recorded(*arrays, name, operands, **params):
        ran.append((name, *(arrays[operands.index(array)].shape for array in ("query", "key"))))
        return run(*arrays, name=name, operands=operands, **params)

    run = passes._with_reference
    monkeypatch.setattr(passes, "_with_reference", recorded)
    arguments = devices.put(SIZES.draw(), devices.mesh(data=2, model=4), B="data", N="model", K="model")
    lowered = jax.jit(lambda arrays: dense.orders(attention, arrays)).lower(arguments)
    ran.clear()
    lowered.compile()
    parts = (1, SIZES.T, 2, SIZES.H), (1, SIZES.S, 1, SIZES.H)
    # The meta-gradient of a curved loss ends with the gradient of its forward pass.
    assert sorted(ran) == sorted((name, *parts) for name in (
        "forward", "backward", "tangent", "double_backward", "backward"))


def test_an_axis_may_be_divided_by_several_mesh_axes():
    arguments = Sizes(B=4, T=8, S=8, N=2, K=2, H=4, E=4).draw()
    assert assert_orders(arguments, devices.mesh(data=2, fsdp=2, model=2), B=("data", "fsdp"), N="model", K="model"
                         ) == {}


@pytest.mark.parametrize(("kind", "axis_type"), [
    *((kind, AxisType.Auto) for kind in ("causal_window", "offset", "traced_offset", "documents", "mask")),
    *((kind, AxisType.Explicit) for kind in ("causal_window", "key_ranges"))], ids=str)
def test_queries_are_divided_and_their_rules_shifted(kind, axis_type):
    """Gradients of keys and values are then sums over devices, and nothing else is communicated."""
    arguments = SIZES.draw() | KINDS[kind]
    collectives = assert_orders(arguments, devices.mesh(axis_type, data=2, seq=4), B="data", T="seq")
    assert set(collectives) <= {"all-reduce"}


def test_a_forward_pass_of_divided_queries_communicates_nothing():
    arguments = devices.put(SIZES.draw(), devices.mesh(data=2, seq=4), B="data", T="seq")
    function = functools.partial(jttt.dot_product_attention, is_causal=True)
    assert devices.compiled(lambda arrays: function(**arrays), arguments)[1] == {}


@pytest.mark.parametrize(("key_heads", "axis_type"), [(1, AxisType.Auto), (2, AxisType.Explicit)], ids=str)
def test_a_key_head_may_serve_the_query_heads_of_several_devices(key_heads, axis_type):
    sizes = SIZES._replace(N=8, K=key_heads)
    collectives = assert_orders(sizes.draw(), devices.mesh(axis_type, data=2, model=4), B="data", N="model")
    assert set(collectives) == {"all-reduce"}


def test_everything_at_once():
    collectives = assert_orders(SIZES.draw() | KINDS["everything"], devices.mesh(data=2, seq=2, model=2),
                                B="data", T="seq", N="model", K="model")
    assert set(collectives) <= {"all-reduce"}


@pytest.mark.parametrize(("kind", "axis_type"), [
    ("bias", AxisType.Auto), ("bias_of_keys", AxisType.Auto), ("sinks", AxisType.Explicit)], ids=str)
def test_gradients_of_what_devices_share_are_added_up(kind, axis_type):
    arguments = SIZES.draw() | KINDS[kind]
    collectives = assert_orders(arguments, devices.mesh(axis_type, data=2, model=4), B="data", N="model", K="model")
    assert set(collectives) == {"all-reduce"}


def test_sums_over_devices_are_not_of_rounded_parts():
    """Each device's part of a key's gradient is a large number, and they cancel."""
    T = 64
    query, key = (jnp.zeros((1, T, 1, 4), jnp.bfloat16) for _ in range(2))
    value = jnp.ones((1, T, 1, 4), jnp.bfloat16)
    weights = jnp.where(jnp.arange(T) < T // 2, 1.0, -1.0) + jnp.where(jnp.arange(T) == 0, 2.0**-7, 0)
    mesh = devices.mesh(seq=2)
    query = jax.device_put(query, NamedSharding(mesh, P(None, "seq")))

    def loss(value):
        return jnp.sum(weights[:, None, None] * jttt.dot_product_attention(query, key, value).astype(jnp.float32))

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(value).astype(jnp.float32), 2.0**-7 / T, rtol=1e-2)


# What cannot be divided.


@TYPES
def test_sharded_keys_are_gathered_with_a_warning(axis_type):
    mesh = devices.mesh(axis_type, data=2, seq=4)
    with pytest.warns(PartitioningWarning, match=r"key along its keys \(mesh axis seq\).*ring_attention"):
        collectives = assert_orders(SIZES.draw() | dict(is_causal=True), mesh, B="data", T="seq", S="seq")
    assert "all-gather" in collectives


def test_sharded_widths_are_gathered_with_a_warning():
    with pytest.warns(PartitioningWarning, match=r"query along its width \(mesh axis model\)"):
        assert_orders(SIZES.draw(), devices.mesh(data=2, model=4), B="data", H="model", E="model")


def test_heads_that_do_not_fit_their_key_heads_are_gathered_with_a_warning():
    # Three query heads a device, of groups of two.
    sizes = SIZES._replace(N=12, K=6)
    with pytest.warns(PartitioningWarning, match="query along its heads"):
        assert_orders(sizes.draw(), devices.mesh(model=4), N="model")


def test_parts_of_a_mesh_axis_are_gathered():
    """Two heads, and their widths, out of an axis that is sharded over eight devices as a whole."""
    sizes = Sizes(B=1, T=8, S=8, N=2, K=2, H=8, E=8)
    arguments = sizes.draw()
    mesh = devices.mesh(model=8)
    flat = {name: jax.device_put(x.reshape(1, 8, 16), NamedSharding(mesh, P(None, None, "model")))
            for name, x in arguments.items()}
    with pytest.warns(PartitioningWarning, match="a part of model"):
        results = jax.jit(lambda flat: dense.orders(attention, {
            name: x.reshape(1, 8, 2, 8) for name, x in flat.items()}))(flat)
    plain.assert_close(results, dense.exact_orders(arguments), 1e-5)


@pytest.mark.oldest
def test_without_sharded_keys_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_orders(SIZES.draw() | dict(is_causal=True), devices.mesh(data=2, model=4),
                      B="data", N="model", K="model")


# Around and inside jit.


def test_outside_jit_results_are_sharded_as_operands():
    arguments = devices.put(SIZES.draw(), devices.mesh(data=2, model=4), B="data", N="model", K="model")
    gradient = jax.grad(lambda query: jnp.sum(jttt.dot_product_attention(**arguments | dict(query=query))))
    assert gradient(arguments["query"]).sharding.spec[:3] == ("data", None, "model")


@pytest.mark.oldest
@pytest.mark.parametrize("letters", [dict(T="model"), dict(N="model")], ids=str)
def test_order_three_and_forward_over_forward_with_explicit_types(letters):
    """Plain formulas there, in which no type says how a product over a divided axis is sharded."""
    arguments = Sizes(B=2, T=8, S=8, N=4, K=2, H=4, E=4).draw()
    mesh = devices.mesh(AxisType.Explicit, data=2, model=4)

    def losses(arrays):
        def first(arrays):
            return jnp.sum(jnp.sin(jttt.dot_product_attention(**arrays)))

        def penalty(loss):
            return lambda arrays: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss)(arrays).values())

        def twice_forward(arrays):
            return jax.jvp(lambda arrays: jax.jvp(first, (arrays,), (arrays,))[1], (arrays,), (arrays,))[1]

        return jax.grad(penalty(penalty(first)))(arrays), jax.grad(twice_forward)(arrays)

    expected = jax.jit(losses)(arguments)
    with jax.set_mesh(mesh):
        results = jax.jit(losses)(devices.put(arguments, mesh, B="data", **letters))
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_vmapped_axes_are_divided():
    arguments = Sizes(B=2, T=8, S=8, N=4, K=4, H=4, E=4).draw()
    mesh = devices.mesh(tasks=2, model=4)
    spec = NamedSharding(mesh, P("tasks", None, None, "model"))
    query, key = (jax.device_put(jnp.stack([x, 2 * x]), spec) for x in (arguments["query"], arguments["key"]))
    value = arguments["value"]

    def penalty(query, key, value):
        inner = jax.grad(lambda *x: jnp.sum(jnp.sin(jttt.dot_product_attention(*x))), (0, 1, 2))(query, key, value)
        return sum(jnp.sum(jnp.sin(g)) for g in inner)

    mapped = jax.vmap(jax.grad(penalty, (0, 1)), (0, 0, None))
    results, collectives = devices.compiled(mapped, query, key, value)
    assert collectives == {}
    expected = [jax.grad(penalty, (0, 1))(factor * arguments["query"], factor * arguments["key"], value)
                for factor in (1, 2)]
    for result, parts in zip(results, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(result, np.stack(parts), atol=1e-5)


def test_a_program_for_export_is_right_without_being_divided():
    arguments = SIZES.draw()
    mesh = devices.mesh(data=2, model=4)
    placed = devices.put(arguments, mesh, B="data", N="model", K="model")
    function = jax.jit(lambda arrays: attention(**arrays))
    exported = jax.export.export(function)(placed)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    for result, expected in zip(exported.call(placed), function(arguments), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.gpu
def test_sharded_arrays_run_kernels():
    """On a mesh of one GPU the program has the kernels that it has without a mesh."""
    arguments = {name: jnp.asarray(x, jnp.bfloat16) for name, x in Sizes(1, 128, 128, 2, 2, 64, 64).draw().items()}
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    placed = devices.put(arguments, mesh, B="data", N="model", K="model")
    kernels = functools.partial(attention, implementation="triton")
    texts = [jax.jit(lambda arrays: dense.orders(kernels, arrays)).lower(arrays).compile().as_text()
             for arrays in (placed, arguments)]
    counts = [text.count('custom_call_target="triton_kernel_call') for text in texts]
    assert counts[0] == counts[1] >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("letters", [dict(B="gpus"), dict(N="gpus", K="gpus"), dict(T="gpus")], ids=str)
def test_several_gpus_each_run_kernels_on_their_part(letters):
    count = len(jax.devices())
    if count < 2:
        pytest.skip("needs two GPUs")
    sizes = Sizes(B=count, T=128 * count, S=192, N=count, K=count, H=64, E=64)
    arguments = dense.floats(sizes.draw() | dict(is_causal=True), jnp.bfloat16)
    mesh = jax.make_mesh((count,), ("gpus",), axis_types=(AxisType.Auto,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PartitioningWarning)
        results, collectives = sharded_orders(
            arguments, mesh, functools.partial(attention, implementation="triton"), **letters)
    assert set(collectives) <= ({"all-reduce"} if "T" in letters else set())
    plain.assert_close(results, dense.exact_orders(arguments), 2e-2)
