"""Forward mode, alone and mixed with reverse mode in any order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from tests import dense, jaxprs, plain
from tests.dense import Sizes
from tests.plain import Problem

EXACT = 1e-11

# In float64, on plain formulas: rounding hides nothing.

ARRAYS = tuple(Problem(T=4, S=5, N=2, K=1, H=3, E=2, B=2).draw(np.float64)[0])
TANGENTS = tuple(np.random.default_rng(i).standard_normal(x.shape) for i, x in enumerate(ARRAYS))


def ours(*arrays):
    return plain.joined(*jttt.dot_product_attention(*arrays, is_causal=True, return_residual=True))


def theirs(*arrays):
    return plain.joined(*plain.attention(*arrays, is_causal=True))


def curved_sum(tree):
    """A scalar with no derivative that is zero or constant."""
    return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(jax.tree.leaves(tree)))


def loss(attention):
    return lambda *arrays: curved_sum(attention(*arrays))


def along(function):
    """The tangent of a function of the arrays."""
    return lambda *arrays: jax.jvp(function, arrays, TANGENTS)[1]


def gradient(function):
    return jax.grad(function, (0, 1, 2))


FORWARD = ["forward", "tangent"]
SECOND = ["tangent", "double_backward", "backward"]

# What is differentiated how, and the passes that it takes.
FORMS = {
    "jvp": (lambda f: lambda *x: jax.jvp(f, x, TANGENTS), FORWARD),
    "linearize": (lambda f: lambda *x: jax.linearize(f, *x)[1](*TANGENTS), FORWARD),
    "forward over reverse": (lambda f: along(gradient(loss(f))), [*FORWARD, "backward", *SECOND]),
    "reverse over forward": (lambda f: gradient(along(loss(f))), [*FORWARD, *SECOND]),
    "reverse over reverse": (lambda f: gradient(lambda *x: curved_sum(gradient(loss(f))(*x))),
                             ["forward", "backward", *SECOND]),
    "gradient of the direction": (lambda f: lambda *x: gradient(
        lambda *t: curved_sum(jax.jvp(f, x, t)[1]))(*TANGENTS), [*FORWARD, "backward"]),
    "forward over forward": (lambda f: along(along(f)), None),
    "gradient of a Hessian-vector product": (
        lambda f: gradient(lambda *x: curved_sum(along(gradient(loss(f)))(*x))), None),
    "tangent of a meta-gradient": (
        lambda f: along(gradient(lambda *x: curved_sum(gradient(loss(f))(*x)))), None),
    "reverse over forward over forward": (lambda f: gradient(along(along(loss(f)))), None),
    "mapped Hessian-vector products": (lambda f: lambda *x: jax.vmap(lambda t: jax.jvp(
        lambda key: gradient(loss(f))(x[0], key, x[2]), (x[1],), (t,)))(jnp.stack([TANGENTS[1]] * 2)),
        [*FORWARD, "backward", *SECOND]),
    "gradient of mapped tangents": (lambda f: gradient(lambda *x: curved_sum(jax.vmap(lambda t: jax.jvp(
        lambda key: f(x[0], key, x[2]), (x[1],), (t,))[1])(jnp.stack([TANGENTS[1], x[1]])))),
        [*FORWARD, "backward", "tangent", "double_backward"]),
}


@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    differentiate, passes = FORMS[form]
    mine, exact = (jax.tree.leaves(jax.jit(differentiate(f))(*ARRAYS)) for f in (ours, theirs))
    for x, y in zip(mine, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT)
    if passes is not None:
        assert jaxprs.names(differentiate(ours), *ARRAYS) == passes


@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
def test_hessian():
    arrays, _ = Problem(T=2, S=3, N=2, K=1, H=2).draw(np.float64)
    mine, exact = (jax.tree.leaves(jax.jit(jax.hessian(loss(f), (0, 1, 2)))(*arrays)) for f in (ours, theirs))
    for x, y in zip(mine, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT)


@pytest.mark.usefixtures("float64")
def test_through_scan_and_remat():
    """The tangent of a scanned step is one equation of its body, with its transpose."""
    def looped(attention):
        def step(x, _):
            y = jax.checkpoint(lambda x: attention(x, x, x)[..., :-1])(x)
            return x + y, jnp.sum(y**2)

        def total(query, *_):
            return jnp.sum(jax.lax.scan(step, query, length=3)[1])

        return total

    for form in ("jvp", "forward over reverse", "reverse over forward"):
        differentiate, _ = FORMS[form]
        mine, exact = (jax.tree.leaves(jax.jit(differentiate(looped(f)))(*ARRAYS)) for f in (ours, theirs))
        for x, y in zip(mine, exact, strict=True):
            np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT)


# Masks, biases, sinks and soft cap, in kernels and in plain formulas, for some arguments at a time.

SIZES = Sizes(B=2, T=33, S=40, N=2, K=1, H=5, E=7)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)


def jvp(function, arguments, moved):
    """Output, lse and their tangents for the inputs that are named."""
    inputs = {name: x for name, x in arguments.items() if name in moved}
    others = {name: x for name, x in arguments.items() if name not in moved}

    def direction(name, x):
        """Of values that float16 has."""
        return np.random.default_rng([*name.encode()]).standard_normal(x.shape, np.float32).astype("e").astype(x.dtype)

    values, tangents = jax.jit(lambda inputs, tangents: jax.jvp(
        lambda inputs: function(**others, **inputs), (inputs,), (tangents,)))(
            inputs, {name: direction(name, x) for name, x in inputs.items()})
    return dict(zip(("output", "lse", "t_output", "t_lse"), (*values, *tangents), strict=True))


@pytest.mark.parametrize(("kind", "moved"), [
    ("causal_window", ("query", "key", "value")),
    ("key_ranges", ("value",)),
    ("mask", ("query", "key")),
    ("bias", ("bias",)),
    ("bias_of_keys", ("query", "bias")),
    ("sinks", ("sinks",)),
    ("everything", dense.INPUTS),
])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), [
    ("triton", "float32", 2e-5), ("triton", "float16", 1e-2), ("xla", "float32", 2e-5), ("xla", "float16", 1e-2)])
def test_tangents_of_every_kind(kind, moved, implementation, dtype, tolerance):
    arguments = dense.floats(SIZES.draw() | KINDS[kind], dtype)
    mine = jvp(functools.partial(jttt.dot_product_attention, implementation=implementation, return_residual=True),
               arguments, moved)
    with jax.enable_x64(True):
        inputs = dense.floats({name: x for name, x in arguments.items() if name in dense.INPUTS}, np.float64)
        options = {name: x for name, x in arguments.items() if name in dense.OPTIONS}
        exact = jvp(functools.partial(dense.attention, seen=dense.seen(arguments), **options), inputs, moved)
    empty = np.isneginf(exact["lse"])
    assert (np.isneginf(mine["lse"]) == empty).all()
    assert not np.asarray(mine["t_output"])[empty].any() and not np.asarray(mine["t_lse"])[empty].any()
    mine, exact = (x | dict(lse=np.where(empty, 0, x["lse"])) for x in (mine, exact))
    plain.assert_close(mine, exact, tolerance)


@pytest.mark.oldest
@pytest.mark.parametrize("moved", [("query",), ("value",), ("key", "value"), ("query", "key", "value")], ids=str)
def test_a_tangent_makes_only_what_is_asked(moved):
    arrays = dict(zip(("query", "key", "value"), ARRAYS, strict=True))
    _, tangent = jaxprs.passes(lambda tangents: jttt.dot_product_attention_jvp(arrays, tangents),
                               {name: arrays[name] for name in moved})
    directions = {name for name in tangent.params["operands"] if name.startswith("t_")}
    assert directions == {f"t_{name}" for name in moved}
    assert not {"d_output", "delta"} & set(tangent.params["operands"])
    assert "row_term" not in tangent.params["wanted"]


# The public function.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("return_residual", [False, True])
def test_none_is_a_tangent_of_zero(return_residual):
    options = dict(is_causal=True, return_residual=return_residual)
    mine = jttt.dot_product_attention_jvp(ARRAYS, (TANGENTS[0], None, TANGENTS[2]), **options)
    exact = jax.jvp(lambda *x: plain.attention(*x, is_causal=True), ARRAYS,
                    (TANGENTS[0], np.zeros_like(TANGENTS[1]), TANGENTS[2]))
    exact = exact if return_residual else [x[0] for x in exact]
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT)
    assert jax.tree.structure(mine) == jax.tree.structure(tuple(exact))


@pytest.mark.usefixtures("float64")
def test_arguments_by_name():
    """Of a bias, sinks and the scale; the same direction, told in the three ways that there are."""
    query, key, value = ARRAYS
    bias, sinks, scale = np.linspace(-1, 1, 20).reshape(4, 5), np.array([0.3, -0.2]), 0.4
    by_name = dict(query=query, key=key, value=value, bias=bias, sinks=sinks, scale=scale)
    _, expected = jax.jvp(lambda bias, sinks, scale: jttt.dot_product_attention(
        query, key, value, bias, sinks=sinks, scale=scale), (bias, sinks, scale), (bias, sinks, 1.0))
    for primals in (by_name, {name: by_name[name] for name in reversed(by_name)}):
        _, mine = jttt.dot_product_attention_jvp(primals, dict(scale=1.0, bias=bias, sinks=sinks))
        np.testing.assert_allclose(mine, expected, rtol=EXACT)
    _, of_bias = jttt.dot_product_attention_jvp((*ARRAYS, bias), (None, None, None, bias), sinks=sinks, scale=scale)
    _, again = jttt.dot_product_attention_jvp(by_name, dict(bias=bias, sinks=None))
    np.testing.assert_allclose(of_bias, again, rtol=EXACT)


@pytest.mark.usefixtures("float64")
def test_it_is_differentiable_in_primals_and_tangents():
    def tangent(attention_jvp):
        return lambda *x: curved_sum(attention_jvp(x[:3], x[3:]))

    mine, exact = (jax.grad(tangent(jvp), range(6))(*ARRAYS, *TANGENTS) for jvp in (
        functools.partial(jttt.dot_product_attention_jvp, is_causal=True, return_residual=True),
        functools.partial(jax.jvp, functools.partial(plain.attention, is_causal=True))))
    for x, y in zip(mine, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("primals", "tangents", "error", "message"), [
    (ARRAYS[:2], TANGENTS, ValueError, "primals has length 2: expected (query, key, value)"),
    (ARRAYS, TANGENTS[:1], ValueError, "tangents has length 1"),
    (ARRAYS, dict(bias=ARRAYS[0]), ValueError, "tangents has bias and primals has not"),
    (ARRAYS, dict(mask=ARRAYS[0]), ValueError, "tangents has mask: expected names among query, key, value, bias"),
    (ARRAYS, (TANGENTS[0], TANGENTS[0], None), ValueError, "the tangent of key has shape [2, 4, 2, 3]"),
    (ARRAYS, (TANGENTS[0].astype(np.float16), None, None), ValueError,
     "the tangent of query has shape [2, 4, 2, 3] and dtype float16: expected those of query"),
])
def test_errors_name_the_argument(primals, tangents, error, message):
    with pytest.raises(error) as raised:
        jttt.dot_product_attention_jvp(primals, tangents)
    assert message in str(raised.value)
