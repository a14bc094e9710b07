"""Attention inside `jax.shard_map`, whose types say over which mesh axes a value varies, and inside `jax.pmap`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jttt
from tests import devices, plain
from tests.plain import Problem

PROBLEM = Problem(B=2, T=12, S=12, N=4, K=4, H=4, is_causal=True)
CHECKS = pytest.mark.parametrize("check_vma", [True, False])

attention = functools.partial(jttt.dot_product_attention, is_causal=True)


def draw(problem=PROBLEM):
    arrays, _ = problem.draw(np.float32)
    return arrays


def gradients(query, key, value):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), (0, 1, 2))(query, key, value)


def meta_gradients(query, key, value):
    return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in gradients(*x)), (0, 1, 2))(query, key, value)


ORDERS = pytest.mark.parametrize("order", [lambda *x: (attention(*x),), gradients, meta_gradients],
                                 ids=["value", "gradient", "meta_gradient"])


def assert_same(results, expected):
    for result, x in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, x, atol=2e-5)


@ORDERS
@CHECKS
def test_each_order_is_that_of_the_whole(order, check_vma):
    spec = P("data", None, "model")
    mapped = jax.shard_map(order, mesh=devices.mesh(data=2, model=4), in_specs=spec, out_specs=spec,
                           check_vma=check_vma)
    results, collectives = devices.compiled(mapped, *draw())
    assert collectives == {}
    assert_same(results, jax.jit(order)(*draw()))


@ORDERS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_axes_of_size_one_that_are_left_to_the_compiler(order, kind):
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:4])
    spec = P(None, None, "model")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, P("data", None, "model"))) for x in draw()]
        mapped = jax.shard_map(order, in_specs=spec, out_specs=spec, axis_names={"model"})
        results, _ = devices.compiled(mapped, *placed)
    assert_same(results, jax.jit(order)(*draw()))


@ORDERS
def test_axes_that_are_left_to_the_compiler_are_divided(order):
    """Manual over the batch, automatic over heads: still no communication."""
    mesh = devices.mesh(data=2, model=4)
    placed = [devices.put(dict(query=x), mesh, B="data", N="model")["query"] for x in draw()]
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(order, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        results, collectives = devices.compiled(mapped, *placed)
    assert collectives == {}
    assert_same(results, jax.jit(order)(*draw()))


def test_a_result_that_varies_is_noticed():
    mapped = jax.shard_map(attention, mesh=devices.mesh(data=2), in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped)(*draw())


def test_what_all_devices_share_gets_the_gradients_of_all():
    """Heads of query are divided, and all of them attend to one key head: key varies over no axis."""
    arrays = draw(PROBLEM._replace(K=1))
    mesh = devices.mesh(model=4)

    def local_meta(query, key, value):
        d_query, *shared = gradients(query, key, value)
        # Gradients of key and value are the same on every device, and the loss is the sum over devices.
        return jnp.sum(jnp.sin(d_query)) + sum(jnp.sum(jnp.sin(g)) for g in shared) / mesh.shape["model"]

    specs = (P(None, None, "model"), P(), P())
    for function, expected in ((gradients, gradients), (jax.grad(local_meta, (0, 1, 2)), meta_gradients)):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs)
        results, collectives = devices.compiled(mapped, *arrays)
        assert set(collectives) == {"all-reduce"}
        assert_same(results, jax.jit(expected)(*arrays))


def test_integer_arrays_may_vary_alone():
    """A mask that differs between devices makes a result that does, of inputs that do not."""
    arrays = draw()
    lengths = np.array([3, 7], np.int32)
    mapped = jax.shard_map(
        lambda length, *x: jttt.dot_product_attention(*x, key_value_seq_lengths=jnp.repeat(length, 2))[None],
        mesh=devices.mesh(data=2), in_specs=(P("data"), P(), P(), P()), out_specs=P("data"))
    results = jax.jit(mapped)(lengths, *arrays)
    for result, length in zip(results, lengths, strict=True):
        visible = np.arange(12) < length
        np.testing.assert_allclose(result, plain.attention(*arrays, visible=visible)[0], atol=1e-5)


@pytest.mark.oldest
@ORDERS
def test_pmap(order):
    def of_one(*x):
        return [result[0] for result in order(*(each[None] for each in x))]

    results = jax.pmap(of_one, devices=jax.devices("cpu")[:2])(*draw())
    assert_same(results, jax.jit(order)(*draw()))


def test_kernels_run_on_each_device():
    """The kernels themselves, in Triton's interpreter, under types that say what varies."""
    if jax.default_backend() == "gpu":
        pytest.skip("the interpreter runs on a machine without a GPU")
    arrays = [x[:, :, :2] for x in draw()]
    spec = P("data")
    mapped = jax.shard_map(functools.partial(attention, implementation="triton"), mesh=devices.mesh(data=2),
                           in_specs=spec, out_specs=spec)
    assert_same([jax.jit(mapped)(*arrays)], [attention(*arrays)])


@pytest.mark.gpu
@ORDERS
def test_kernels_run_under_shard_map(order):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    arrays, _ = Problem(B=2, T=1024, S=1024, N=2, K=2, H=64).draw(jnp.bfloat16)
    program = jax.jit(jax.shard_map(order, mesh=mesh, in_specs=P("data"), out_specs=P("data"))).lower(*arrays).compile()
    assert "triton_kernel_call" in program.as_text()
    for result, x in zip(program(*arrays), jax.jit(order)(*arrays), strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float32), np.asarray(x, np.float32), rtol=2e-2, atol=2e-2)
