"""The loop that learns from chunks, beside Python loops, plain gradients and numpy."""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jttt
from tests import jaxprs

pytestmark = pytest.mark.usefixtures("float64", "cheap_compilation")

CHUNKS, LENGTH, WIDTH = 5, 3, 4
OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3)),
    "momentum": optax.sgd(0.3, momentum=0.9),
    "adam": optax.adam(0.1),
}


def loss(weights, carry, chunk):
    """A prediction that depends on weights, on a running mean of what was read, and on the chunk."""
    read, target = chunk
    predicted = jnp.tanh(read @ weights["matrix"] + carry) * weights["gain"]
    errors = jnp.sum((predicted - target) ** 2, axis=-1)
    return jnp.mean(errors), (0.5 * carry + jnp.mean(predicted, axis=0), errors)


def drawn(*batch: int):
    """Weights, a carry and chunks `(read, target)`."""
    random = np.random.default_rng(0)
    weights = {"matrix": random.standard_normal((WIDTH, 2)), "gain": random.standard_normal(2)}
    chunks = tuple(random.standard_normal((*batch, CHUNKS, LENGTH, size)) for size in (WIDTH, 2))
    return jax.tree.map(jnp.asarray, (weights, random.standard_normal(2), chunks))


def in_python(optimizer, weights, carry, chunks):
    """Errors of all chunks, and the last weights and carry, by a Python loop around `jax.grad`."""
    state, errors = optimizer.init(weights), []
    for i in range(CHUNKS):
        chunk = jax.tree.map(lambda x, i=i: x[i], chunks)
        held = carry
        gradient = jax.grad(lambda weights, held=held, chunk=chunk: loss(weights, held, chunk)[0])(weights)
        carry, now = loss(weights, carry, chunk)[1]
        updates, state = optimizer.update(gradient, state, weights)
        weights = jax.tree.map(jnp.add, weights, updates)
        errors.append(now)
    return jnp.stack(errors), weights, carry


def in_scan(optimizer, weights, carry, chunks, checkpoint_every=None):
    state = jttt.InnerState.start(optimizer, weights, carry)
    state, errors = jttt.inner_loop(loss, optimizer, state, chunks, checkpoint_every=checkpoint_every)
    return errors, state.weights, state.carry


def curved(function, *arguments):
    """A scalar of everything that a loop returns."""
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*arguments)))


def assert_trees_close(ours, exact):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13), ours, exact)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_and_its_meta_gradient(name):
    weights, carry, chunks = drawn()
    ours, exact = (jax.jit(jax.value_and_grad(functools.partial(curved, functools.partial(run, OPTIMIZERS[name])),
                                              (0, 1, 2)))(weights, carry, chunks) for run in (in_scan, in_python))
    assert_trees_close(ours, exact)


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8])
def test_recomputing_changes_no_number(every):
    weights, carry, chunks = drawn()
    run = functools.partial(in_scan, OPTIMIZERS["momentum"])
    exact = run(weights, carry, chunks)
    assert_trees_close(run(weights, carry, chunks, every), exact)
    gradients = [jax.jit(jax.grad(lambda *x, r=r: curved(run, *x, r), (0, 1, 2)))(weights, carry, chunks)
                 for r in (None, every)]
    assert_trees_close(*gradients)


def test_recomputing_keeps_fewer_arrays():
    """The residuals of a gradient through 16 chunks: all of what each computed, every fourth state, every state."""
    width = 64
    matrix, chunks = jnp.zeros((width, width)), jnp.zeros((16, 8, width))

    def kept(every):
        def run(matrix):
            def loss(matrix, carry, chunk):
                return jnp.sum(jnp.tanh(jnp.tanh(chunk @ matrix) @ matrix) ** 2), (carry, ())

            optimizer = optax.sgd(0.1)
            state = jttt.InnerState.start(optimizer, matrix)
            return jttt.inner_loop(loss, optimizer, state, chunks, checkpoint_every=every)[0].weights

        residuals = jax.eval_shape(lambda matrix: jax.vjp(run, matrix)[1], matrix)
        return sum(x.size for x in jax.tree.leaves(residuals))

    state, slack = matrix.size, chunks.size + matrix.size
    assert kept(4) <= 4 * state + slack
    assert kept(1) <= 16 * state + slack
    assert kept(None) > 2 * kept(1)


@pytest.mark.oldest
def test_a_batch_under_vmap():
    weights, carry, chunks = drawn(3)
    run = functools.partial(in_scan, OPTIMIZERS["adam"], checkpoint_every=2)
    batched = jax.jit(jax.vmap(run, in_axes=(None, None, 0)))(weights, carry, chunks)
    for i in range(3):
        alone = in_python(OPTIMIZERS["adam"], weights, carry, jax.tree.map(lambda x, i=i: x[i], chunks))
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], batched), alone)


def test_steps_by_hand_equal_the_loop():
    weights, carry, chunks = drawn()
    optimizer = OPTIMIZERS["momentum"]
    state = jttt.InnerState.start(optimizer, weights, carry)
    for i in range(CHUNKS):
        state, _ = jttt.inner_step(loss, optimizer, state, jax.tree.map(lambda x, i=i: x[i], chunks))
    looped, _ = jttt.inner_loop(loss, optimizer, jttt.InnerState.start(optimizer, weights, carry), chunks)
    assert_trees_close(state, looped)


def test_a_learning_rate_can_be_learned():
    weights, carry, chunks = drawn()

    def total(rate, run):
        return curved(functools.partial(run, optax.sgd(rate)), weights, carry, chunks)

    assert_trees_close(jax.grad(total)(0.3, in_scan), jax.grad(total)(0.3, in_python))


def test_the_inner_gradient_leaves_the_caches_out():
    """No pass of a step makes a gradient of the cache that the loss carries."""
    window, chunk, width = 8, 4, 4

    def attentive(matrix, cache, x):
        query, key, value = jnp.einsum("td,cde->cte", x, matrix)[:, :, None]
        output, cache = jttt.chunk_attention(query, key, value, cache)
        return jnp.sum(jnp.sin(output)), (cache, ())

    def read(matrix, x):
        state = jttt.InnerState.start(optax.sgd(0.1), matrix, jttt.empty_cache(window, 1, width, x.dtype))
        return jttt.inner_step(attentive, optax.sgd(0.1), state, x)[0]

    found = [equation for equation in jaxprs.passes(read, jnp.ones((3, width, width)), jnp.ones((chunk, width)))
             if jaxprs.operands(equation)["key"].shape[-3] == window]
    assert {equation.params["name"] for equation in found} == {"forward", "backward"}
    assert not any({"d_key", "d_value"} & set(equation.params["wanted"]) for equation in found)


def test_a_batch_sharded_over_devices():
    """Under jit, with sequences on two devices, in a process that has two."""
    program = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from tests import test_inner_loop as t
        jax.config.update("jax_enable_x64", True)
        assert jax.device_count() == 2
        weights, carry, chunks = t.drawn(4)
        def total(weights, chunks):
            run = lambda chunks: t.in_scan(t.OPTIMIZERS["clipped"], weights, carry, chunks, 2)[0]
            return jnp.mean(jax.vmap(run)(chunks))
        gradient = jax.jit(jax.grad(total))
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharded = gradient(weights, jax.device_put(chunks, NamedSharding(mesh, P("data"))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), sharded, gradient(weights, chunks))
    """
    root = Path(__file__).parents[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu",
                                "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, cwd=root,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Errors.


@pytest.mark.parametrize(("chunks", "message"), [
    ((jnp.zeros((3, 2)), jnp.zeros((4, 2))), r"\[0\]: \[3, 2\], \[1\]: \[4, 2\]: expected one number of chunks"),
    (jnp.zeros(()), r"itself: \[\]: expected one number"),
    (jnp.zeros((0, 3)), r"itself: \[0, 3\]: expected one number of chunks, at least 1"),
    ((), "none: expected one number"),
])
def test_chunks_that_are_not_chunks(chunks, message):
    state = jttt.InnerState.start(OPTIMIZERS["sgd"], jnp.zeros(2))
    with pytest.raises(ValueError, match=message):
        jttt.inner_loop(loss, OPTIMIZERS["sgd"], state, chunks)


def test_checkpoint_every_nothing():
    weights, carry, chunks = drawn()
    with pytest.raises(ValueError, match="checkpoint_every was 0: expected at least 1, or None"):
        in_scan(OPTIMIZERS["sgd"], weights, carry, chunks, 0)
