"""JAX's transformations around attention: loops, rematerialisation, vmap, and all of them at once."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from jttt import passes
from tests import jaxprs, plain
from tests.plain import Problem

EXACT = 1e-11
POLICIES = jax.checkpoint_policies
SAVE_NAMES = POLICIES.save_only_these_names("attention_output", "attention_lse")


def ours(*arrays, **options):
    return jttt.dot_product_attention(*arrays, is_causal=True, **options)


def theirs(*arrays):
    return plain.attention(*arrays, is_causal=True)[0]


def assert_close(mine, exact, tolerance=EXACT):
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def curved_sum(tree):
    """A scalar with no derivative that is zero or constant."""
    return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(jax.tree.leaves(tree)))


# Test-time training end to end (arXiv 2512.23675): attention on [T, N, H] inside vmap, inside a scan of
# gradient steps, inside jax.checkpoint, inside jax.grad.

HEADS, WIDTH, LENGTH, STEPS, EXAMPLES = 2, 3, 4, 3, 2


@pytest.fixture(scope="module")
def meta_learning():
    generator = np.random.default_rng(0)
    size = HEADS * WIDTH
    weights = {name: generator.standard_normal((size, size)) / 3 for name in ("query", "key", "value", "output")}
    return weights, generator.standard_normal((STEPS + 1, EXAMPLES, LENGTH, size))


def outer_loss(attention, policy, weights, chunks):
    """The loss on the last chunk of weights that took one gradient step on each of the others."""
    def inner_loss(weights, x):
        heads = [(x @ weights[name]).reshape(*x.shape[:-1], HEADS, WIDTH) for name in ("query", "key", "value")]
        mixed = jax.vmap(attention)(*heads).reshape(x.shape) @ weights["output"]
        return jnp.mean((x + mixed - jnp.roll(x, 1, axis=1))**2)

    @functools.partial(jax.checkpoint, policy=policy)
    def step(weights, x):
        loss, gradients = jax.value_and_grad(inner_loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradients), loss

    adapted, losses = jax.lax.scan(step, weights, chunks[:-1])
    return inner_loss(adapted, chunks[-1]) + 0.1 * jnp.sum(losses)


@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("policy", "forwards_again"), [
    (None, 1), (POLICIES.nothing_saveable, 1), (POLICIES.everything_saveable, 0), (SAVE_NAMES, 0)])
def test_test_time_training(policy, forwards_again, meta_learning):
    """The outer backward sweep runs the forward again only where a policy did not save what it made."""
    mine = jax.jit(jax.grad(functools.partial(outer_loss, ours, policy)))(*meta_learning)
    exact = jax.jit(jax.grad(functools.partial(outer_loss, theirs, policy)))(*meta_learning)
    assert_close(mine, exact)
    names = jaxprs.names(jax.grad(functools.partial(outer_loss, ours, policy)), *meta_learning)
    last_chunk, step = ["forward", "backward"], ["forward", "backward"]
    assert names == step + last_chunk + ["forward"] * forwards_again + ["tangent", "double_backward", "backward"]


@pytest.mark.usefixtures("float64")
def test_test_time_training_in_forward_mode(meta_learning):
    weights, chunks = meta_learning
    direction = jax.tree.map(np.cos, weights)
    mine, exact = (jax.jit(lambda w, f=f: jax.jvp(
        lambda w: outer_loss(f, SAVE_NAMES, w, chunks), (w,), (direction,)))(weights) for f in (ours, theirs))
    assert_close(mine, exact)


# Rematerialisation. What a policy saved must not be made again, and what it did not save must be.

SMALL = Problem(T=4, S=5, N=2, K=1, H=3, B=1).draw(np.float32)[0]


def gradient(function, argnums=(0, 1, 2)):
    return jax.grad(lambda *x: curved_sum(function(*x)), argnums)


def meta_gradient(function):
    return gradient(gradient(function))


def with_policy(policy):
    """Attention under jax.checkpoint; `nested` has one jax.checkpoint in another, `none` has none at all."""
    if policy == "no checkpoint":
        return lambda function: function
    if policy == "nested":
        return lambda function: jax.checkpoint(lambda *x: jax.checkpoint(function)(*(jnp.cos(y) for y in x)))
    return functools.partial(jax.checkpoint, policy=policy)


# How often the forward runs in a gradient and in a meta-gradient. Two checkpoints in one another make it again
# for each of the two, and a meta-gradient does so for the forward sweep and for the backward sweep of the gradient.
REMATS = {
    "no checkpoint": ("no checkpoint", 1, 1),
    "both names": (SAVE_NAMES, 1, 1),
    "everything": (POLICIES.everything_saveable, 1, 1),
    "nothing": (POLICIES.nothing_saveable, 2, 3),
    "one name": (POLICIES.save_only_these_names("attention_output"), 2, 3),
    "nested": ("nested", 2, 5),
}
SAVED = ("no checkpoint", "both names", "everything")


def count(names):
    return dict(collections.Counter(names))


@pytest.mark.oldest
@pytest.mark.parametrize("remat", REMATS)
def test_what_runs_again_under_remat(remat):
    policy, *forwards = REMATS[remat]
    first, second = (jaxprs.names(order(with_policy(policy)(ours)), *SMALL) for order in (gradient, meta_gradient))
    assert [first.count("forward"), second.count("forward")] == forwards
    assert first.count("backward") == 1
    if remat in SAVED:
        assert second == ["forward", "backward", "tangent", "double_backward", "backward"]


@pytest.mark.parametrize("remat", ["no checkpoint", "everything", "nothing", "nested"])
def test_as_much_runs_again_as_of_plain_attention(remat):
    """Whose exponentials are made once in each forward, and saved."""
    def weights(query, key, value):
        return jnp.exp(jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, 2, axis=2))) * jnp.sum(value)

    policy, *forwards = REMATS[remat]
    programs = (jax.make_jaxpr(order(with_policy(policy)(weights)))(*SMALL) for order in (gradient, meta_gradient))
    assert [str(program).count(" exp ") for program in programs] == forwards


@pytest.fixture
def kernels_that_ran(monkeypatch):
    """Names of the kernels that a compiled program ran, through Triton's interpreter, in order."""
    if not passes.interprets_triton():
        pytest.skip("Triton's interpreter is off")
    from triton.runtime.interpreter import InterpretedFunction

    names, launch = [], InterpretedFunction.__getitem__

    def counted(self, grid):
        names.append(self.fn.__name__)
        return launch(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", counted)
    return names


@pytest.mark.parametrize("order", [gradient, meta_gradient])
@pytest.mark.parametrize("remat", REMATS)
def test_what_a_compiled_program_runs_again(remat, order, kernels_that_ran):
    """XLA may find that two forwards are the same, but must not undo what a policy asked for."""
    policy, *forwards = REMATS[remat]
    function = order(with_policy(policy)(functools.partial(ours, implementation="triton")))
    mine = jax.block_until_ready(jax.jit(function)(*SMALL))
    ran = count(kernels_that_ran)
    most = forwards[order is meta_gradient]
    assert min(most, 2) <= ran.pop("forward_kernel") <= most
    if remat in SAVED and order is meta_gradient:
        assert ran == dict(d_query_kernel=2, d_key_value_kernel=2, tangent_kernel=1, g_query_kernel=1,
                           g_key_value_kernel=1)
    assert_close(mine, order(with_policy(policy)(theirs))(*SMALL), 2e-4)


# Loops, branches and jit.

SQUARE = Problem(T=5, S=5, N=2, K=2, H=3).draw(np.float64)[0]

CONTROL_FLOW = {
    "scan": lambda f: lambda q, k, v: jax.lax.scan(lambda x, _: (x + f(x, k, v),) * 2, q, length=3),
    "fori_loop": lambda f: lambda q, k, v: jax.lax.fori_loop(0, 3, lambda i, x: x + f(x, k, v), q),
    "cond": lambda f: lambda q, k, v: [jax.lax.cond(x, f, lambda q, k, v: q * v, q, k, v)
                                       for x in (jnp.sum(q) > 0, jnp.sum(q) <= 0)],
    "cond in scan": lambda f: lambda q, k, v: jax.lax.scan(
        lambda x, i: (jax.lax.cond(i > 1, lambda x: f(x, k, v), jnp.sin, x), i), q, jnp.arange(3.0))[0],
    "mapped cond": lambda f: lambda q, k, v: jax.vmap(
        lambda i: jax.lax.cond(i > 0, lambda x: f(x, k, v), jnp.sin, q))(jnp.arange(2)),
    "jit": lambda f: lambda q, k, v: jax.jit(f)(q, jax.jit(f)(q, k, v), v),
    "map": lambda f: lambda q, k, v: jax.lax.map(lambda x: f(x, k, v), jnp.stack([q, k])),
}


@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("flow", CONTROL_FLOW)
def test_control_flow_at_orders_zero_to_two(flow):
    def orders(attention):
        function = CONTROL_FLOW[flow](attention)
        return jax.jit(lambda *x: (function(*x), meta_gradient(function)(*x)))(*SQUARE)

    assert_close(orders(ours), orders(theirs))


@pytest.mark.usefixtures("float64")
def test_a_while_loop_runs_and_has_a_tangent():
    """JAX has no reverse mode for a loop whose length it does not know."""
    def looped(attention):
        def last(query, key, value):
            return jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x * attention(x, key, value) / 9, query)

        return jax.jit(lambda *x: jax.jvp(last, x, x))(*SQUARE)

    assert_close(looped(ours), looped(theirs))


# vmap over whatever is mapped: parameters, data, lengths. One launch for each pass.

DATA = np.random.default_rng(0).standard_normal((2, 5, 6))
WEIGHTS = np.random.default_rng(1).standard_normal((2, 3, 6, 6)) / 3
LENGTHS = np.array([[3], [5]], np.int32)
NAMES = ("weights", "data", "lengths")


def block(attention):
    """A scalar of weights [3, D, D], data [T, D] and lengths [1]."""
    def loss(weights, data, lengths):
        heads = [(data @ w).reshape(1, 5, 2, 3) for w in weights]
        return curved_sum(attention(*heads, lengths))

    return loss


def ours_of_length(*heads_and_lengths):
    *heads, lengths = heads_and_lengths
    return jttt.dot_product_attention(*heads, key_value_seq_lengths=lengths)


def theirs_of_length(*heads_and_lengths):
    *heads, lengths = heads_and_lengths
    return plain.attention(*heads, visible=jnp.arange(5) < lengths[0])[0]


ORDERS = {
    "gradient": lambda f: jax.grad(f, (0, 1)),
    "meta-gradient": lambda f: jax.grad(lambda w, x, n: curved_sum(jax.grad(f, (0, 1))(w, x, n)), (0, 1)),
    "tangent of the gradient": lambda f: lambda w, x, n: jax.jvp(lambda w: jax.grad(f, (0, 1))(w, x, n), (w,), (w,)),
}
MAPPED = [("weights",), ("data",), ("lengths",), ("weights", "data", "lengths")]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mapped", MAPPED, ids=" ".join)
def test_vmap_outside_of_derivatives(order, mapped):
    axes = [0 if name in mapped else None for name in NAMES]
    arrays = [x if name in mapped else x[0] for name, x in zip(NAMES, (WEIGHTS, DATA, LENGTHS), strict=True)]
    differentiate = ORDERS[order]
    function = jax.vmap(differentiate(block(ours_of_length)), axes)
    each = [differentiate(block(theirs_of_length))(*(x if axis is None else x[i] for x, axis in
                                                     zip(arrays, axes, strict=True))) for i in range(2)]
    assert_close(jax.jit(function)(*arrays), jax.tree.map(lambda *x: jnp.stack(x), *each))
    assert count(jaxprs.names(function, *arrays)) == count(
        jaxprs.names(differentiate(block(ours_of_length)), WEIGHTS[0], DATA[0], LENGTHS[0]))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("order", ["gradient", "meta-gradient", "tangent of the gradient"])
def test_vmap_inside_of_derivatives_and_nested(order):
    """All lengths for all data, mapped one inside the other, of parameters that are not mapped."""
    def summed(attention):
        def loss(weights, data, lengths):
            over_data = jax.vmap(block(attention), (None, 0, None))
            return curved_sum(jax.vmap(over_data, (None, None, 0))(weights, data, lengths))

        return loss

    def loop(weights, data, lengths):
        return curved_sum(jnp.stack([jnp.stack([block(theirs_of_length)(weights, x, n) for x in data])
                                     for n in lengths]))

    arrays = WEIGHTS[0], DATA, LENGTHS
    function = ORDERS[order](summed(ours_of_length))
    assert_close(jax.jit(function)(*arrays), jax.jit(ORDERS[order](loop))(*arrays))
    assert count(jaxprs.names(function, *arrays)) == count(
        jaxprs.names(ORDERS[order](block(ours_of_length)), WEIGHTS[0], DATA[0], LENGTHS[0]))


@pytest.mark.usefixtures("float64")
def test_a_mapped_tangent_copies_no_operand():
    """Four directions in query, for which key, value, output and the log-sum-exp are read again in place."""
    query, key, value = SQUARE
    directions = np.stack([query] * 4)
    _, tangent = jaxprs.passes(lambda *x: jax.vmap(lambda t: jttt.dot_product_attention_jvp(
        x, (t, None, None))[1])(directions), query, key, value)
    sizes = {name: x.size for name, x in jaxprs.operands(tangent).items()}
    assert sizes["t_query"] == 4 * query.size
    assert all(sizes[name] == query.size for name in ("query", "key", "value", "output"))
