"""What `dot_product_attention` accepts, what it refuses and how, and what runs it."""

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from jttt import kernels, passes, reference
from tests import jaxprs, plain

ROOT = Path(__file__).parents[1]
B, T, S, N, K, H, E = 2, 5, 6, 4, 2, 8, 3


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def int32(*values):
    return np.array(values, np.int32)


QUERY, KEY, VALUE = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, E)


# What is refused, with a message that names the argument, what it was and what is expected.

REFUSED = [
    (dict(query=zeros(T, H)), ValueError, "query has shape [5, 8]: expected [B, T, N, H] or [T, N, H]"),
    (dict(key=zeros(1, B, S, K, H)), ValueError,
     "key has shape [1, 2, 6, 2, 8]: expected [B, S, K, H] or [S, K, H]"),
    (dict(key=zeros(S, K, H)), ValueError,
     "key has 3 axes and query 4: expected both with a batch axis or both without"),
    (dict(value=zeros(S, K, E)), ValueError, "value has 3 axes and query 4"),
    (dict(query=zeros(B, T, N, H, dtype="int32")), TypeError,
     "query has dtype int32: expected one of float16, bfloat16, float32, float64"),
    (dict(value=zeros(B, S, K, E, dtype="bool")), TypeError, "value has dtype bool: expected one of"),
    (dict(key=zeros(B, S, K, H, dtype="complex64")), TypeError, "key has dtype complex64: expected one of"),
    (dict(value=zeros(B, S, K, E, dtype="float16")), TypeError,
     "value has dtype float16 and query float32: expected the same"),
    (dict(key=zeros(B, 0, K, H)), ValueError,
     "key has shape [2, 0, 2, 8]: expected every axis of size 1 or more"),
    (dict(key=zeros(3, S, K, H), value=zeros(3, S, K, E)), ValueError,
     "key has batch size 3 and query 2: expected the same"),
    (dict(key=zeros(B, S, K, 9)), ValueError, "key has head width 9 and query 8: expected the same"),
    (dict(value=zeros(B, 7, K, E)), ValueError,
     "value has shape [2, 7, 2, 3] and key [2, 6, 2, 8]: expected the same batch, length and heads"),
    (dict(value=zeros(B, S, 1, E)), ValueError, "value has shape [2, 6, 1, 3] and key [2, 6, 2, 8]"),
    (dict(value=zeros(1, S, K, E)), ValueError, "value has shape [1, 6, 2, 3] and key [2, 6, 2, 8]"),
    (dict(query=zeros(B, T, 3, H)), ValueError,
     "query has 3 heads and key 2: expected a multiple of key's heads"),
    (dict(query=zeros(B, T, 1, H)), ValueError, "query has 1 heads and key 2"),
    (dict(query=zeros(B, T, N, 257), key=zeros(B, S, K, 257)), NotImplementedError,
     "query has head width 257: expected at most 256"),
    (dict(value=zeros(B, S, K, 300)), NotImplementedError, "value has head width 300: expected at most 256"),
    (dict(scale=zeros(2)), ValueError, "scale has shape [2] and dtype float32: expected a number or"),
    (dict(scale=zeros(dtype="int32")), ValueError, "scale has shape [] and dtype int32: expected a number or"),
    (dict(implementation="cudnn"), ValueError, "implementation was 'cudnn': expected 'triton', 'xla' or None"),
    (dict(bias=zeros(T, S, dtype="int32")), TypeError, "bias has dtype int32: expected a floating dtype"),
    (dict(bias=zeros(N, T, 7)), ValueError,
     "bias has shape [4, 5, 7]: expected it to broadcast to [B, N, T, S] = [2, 4, 5, 6]"),
    (dict(bias=zeros(1, B, N, T, S)), ValueError, "bias has shape [1, 2, 4, 5, 6]: expected it to broadcast"),
    (dict(mask=zeros(T, S)), TypeError, "mask has dtype float32: expected bool"),
    (dict(mask=zeros(K, T, S, dtype="bool")), ValueError,
     "mask has shape [2, 5, 6]: expected it to broadcast to [B, N, T, S] = [2, 4, 5, 6]"),
    (dict(query_seq_lengths=zeros(B)), TypeError, "query_seq_lengths has dtype float32: expected int32"),
    (dict(key_value_seq_lengths=int32(6)), ValueError,
     "key_value_seq_lengths has shape [1]: expected [B] = [2]"),
    (dict(local_window_size=-1), ValueError, "local_window_size was -1: expected an int of at least 0"),
    (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size was (1, 2, 3): expected"),
    (dict(local_window_size=1.5), ValueError, "local_window_size was 1.5: expected"),
    (dict(query_offset=1.5), TypeError, "query_offset has dtype float32: expected int32"),
    (dict(query_offset=int32(1, 2, 3)), ValueError, "query_offset has shape [3]: expected it to broadcast to"),
    (dict(key_start=int32(1, 2, 3)), ValueError,
     "key_start has shape [3]: expected it to broadcast to [B, length] = [2, 5]"),
    (dict(key_end=zeros(B, T)), TypeError, "key_end has dtype float32: expected int32"),
    (dict(query_segment_ids=zeros(B, T, dtype="int32")), ValueError,
     "key_value_segment_ids was None and query_segment_ids was given: expected both or neither"),
    (dict(key_value_segment_ids=zeros(B, S, dtype="int32")), ValueError,
     "query_segment_ids was None and key_value_segment_ids was given: expected both or neither"),
    (dict(query_segment_ids=zeros(B, S, dtype="int32"), key_value_segment_ids=zeros(B, S, dtype="int32")),
     ValueError, "query_segment_ids has shape [2, 6]: expected [B, length] = [2, 5]"),
    (dict(logits_soft_cap=0), ValueError, "logits_soft_cap was 0: expected a number from 1e-30 to 1e30, or None"),
    (dict(logits_soft_cap=zeros()), ValueError, "logits_soft_cap was Array(0."),
    (dict(sinks=zeros(N, dtype="int32")), TypeError, "sinks has dtype int32: expected a floating dtype"),
    (dict(sinks=zeros(K)), ValueError, "sinks has shape [2]: expected [N] = [4]"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message[:60] for *_, message in REFUSED])
def test_refused_at_trace_time(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda: jttt.dot_product_attention(**dict(query=QUERY, key=KEY, value=VALUE) | changes))


def test_kernels_refuse_float64():
    with jax.enable_x64(True), pytest.raises(TypeError, match="query has dtype float64 and implementation was"):
        jttt.dot_product_attention(*[x.astype(np.float64) for x in (QUERY, KEY, VALUE)], implementation="triton")


@pytest.mark.skipif(not passes.interprets_triton(), reason="a GPU has bfloat16 products")
def test_the_interpreter_refuses_bfloat16():
    with pytest.raises(NotImplementedError, match="query has dtype bfloat16 and implementation was 'triton' under"):
        jttt.dot_product_attention(*[jnp.asarray(x, "bfloat16") for x in (QUERY, KEY, VALUE)],
                                   implementation="triton")


# What is accepted: what jax.nn accepts, with the same meaning.

# Each of them alone changes the output.
ARGUMENTS = {
    "bias": dict(bias=normal(N, T, S)),
    "mask": dict(mask=np.tri(T, S, 2, dtype=bool)),
    "scale": dict(scale=0.7),
    "is_causal": dict(is_causal=True),
    "query_seq_lengths": dict(query_seq_lengths=int32(5, 3)),
    "key_value_seq_lengths": dict(key_value_seq_lengths=int32(4, 6)),
    "local_window_size": dict(local_window_size=(1, 2)),
    "query_offset": dict(is_causal=True, query_offset=1),
    "key_start": dict(key_start=int32(2)),
    "key_end": dict(key_end=int32([2], [4])),
    "query_segment_ids": dict(query_segment_ids=int32([0, 0, 0, 1, 1], [0] * 5),
                              key_value_segment_ids=int32([0, 0, 1, 1, 1, 1], [0] * 6)),
    "key_value_segment_ids": dict(query_segment_ids=int32([0] * 5, [0] * 5),
                                  key_value_segment_ids=int32([0, 0, 0, 0, 1, 1], [0] * 6)),
    "logits_soft_cap": dict(logits_soft_cap=1.0),
    "sinks": dict(sinks=normal(N)),
}


@pytest.mark.parametrize("name", [name for name in inspect.signature(jttt.dot_product_attention).parameters
                                  if name not in ("query", "key", "value", "implementation", "return_residual")])
def test_no_argument_is_ignored(name):
    without = {key: x for key, x in ARGUMENTS[name].items() if key == "is_causal" != name}
    outputs = [jttt.dot_product_attention(QUERY, KEY, VALUE, **given) for given in (ARGUMENTS[name], without)]
    assert not np.allclose(*outputs)


def test_signature_is_that_of_jax_nn():
    mine, theirs = (inspect.signature(module.dot_product_attention).parameters for module in (jttt, jax.nn))
    assert [name for name in mine if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("name", [None, *(name for name in inspect.signature(jax.nn.dot_product_attention).parameters
                                          if name in ARGUMENTS)])
def test_meaning_is_that_of_jax_nn(name):
    key, value = KEY, normal(B, S, K, H)  # jax.nn has values as wide as keys only.
    given = ARGUMENTS.get(name, {})
    mine, theirs = (module.dot_product_attention(QUERY, key, value, **given) for module in (jttt, jax.nn))
    if name == "query_seq_lengths":
        # What lies past them is 0 here and unspecified there.
        np.testing.assert_array_equal(mine[1, 3:], 0)
        mine, theirs = mine[:, :3], theirs[:, :3]
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.oldest
def test_numpy_inputs_with_and_without_a_batch_axis():
    output, lse = jttt.dot_product_attention(QUERY, KEY, VALUE, return_residual=True)
    assert isinstance(output, jax.Array)
    assert (output.shape, lse.shape, lse.dtype) == ((B, T, N, E), (B, T, N), jnp.float32)
    first = jttt.dot_product_attention(QUERY[0], KEY[0], VALUE[0], return_residual=True)
    for x, y in zip(first, (output[0], lse[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), jnp.float32(0.5), np.array(0.5)], ids=repr)
def test_scale_is_any_number(scale):
    expected = plain.attention(QUERY, KEY, VALUE, scale=0.5)[0]
    np.testing.assert_allclose(jttt.dot_product_attention(QUERY, KEY, VALUE, scale=scale), expected, rtol=1e-5)


@pytest.mark.parametrize(("asked", "precision"), [
    (None, "tf32x3"), ("default", "tf32x3"), ("high", "tf32x3"), ("highest", "ieee"), ("float32", "ieee"),
    ("tensorfloat32", "tf32"), ("bfloat16", "tf32"),
])
def test_precision_is_what_jax_was_asked_for(asked, precision):
    with jax.default_matmul_precision(asked):
        (forward,) = jaxprs.passes(jttt.dot_product_attention, QUERY, KEY, VALUE)
    assert forward.params["spec"].precision == precision


# What runs it: the choice is made for the platform that a computation is lowered for.


@pytest.fixture
def kernels_run(monkeypatch):
    """The names of the passes that kernels were asked to run; plain formulas run them here."""
    names = []

    def run(name, spec, operands, *_):
        names.append(name)
        return getattr(reference, name)(spec, **operands)

    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(passes, "check_cuda", lambda: None)  # Of what real kernels need.
    return names


@pytest.mark.parametrize(("platforms", "implementation", "capability", "runs"), [
    (("cuda",), None, 90, True),
    (("cuda",), None, 80, True),
    (("cuda",), None, 75, False),
    (("cuda",), "xla", 90, False),
    (("cpu",), None, 90, False),
    (("cpu", "cuda"), None, 90, True),
])
def test_kernels_run_where_they_can(platforms, implementation, capability, runs, kernels_run, monkeypatch):
    monkeypatch.setattr(passes, "compute_capability", lambda: capability)
    monkeypatch.setattr(passes, "FEW_SCORES", 0)
    attention = functools.partial(jttt.dot_product_attention, implementation=implementation)
    jax.jit(attention).trace(QUERY, KEY, VALUE).lower(lowering_platforms=platforms)
    assert kernels_run == ["forward"] * runs


@pytest.mark.parametrize(("implementation", "mapped", "more", "runs"), [
    (None, 1, 0, False), (None, 3, 0, False), (None, 1, 1, True), (None, 3, 1, True), ("triton", 3, 0, True)])
def test_kernels_are_not_for_few_scores(implementation, mapped, more, runs, kernels_run, monkeypatch):
    """Scores are counted over batch, query heads and what `jax.vmap` maps, though only query is mapped here."""
    (B, T, N, _), S = QUERY.shape, KEY.shape[1]
    monkeypatch.setattr(passes, "compute_capability", lambda: 90)
    monkeypatch.setattr(passes, "FEW_SCORES", mapped * B * N * T * S - more)
    attention = jax.vmap(functools.partial(jttt.dot_product_attention, implementation=implementation),
                         (0, None, None))
    jax.jit(attention).trace(np.stack([QUERY] * mapped), KEY, VALUE).lower(lowering_platforms=("cuda",))
    assert kernels_run == ["forward"] * runs


def test_float64_never_runs_kernels(kernels_run, monkeypatch):
    monkeypatch.setattr(passes, "compute_capability", lambda: 90)
    monkeypatch.setattr(passes, "FEW_SCORES", 0)
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in (QUERY, KEY, VALUE)]
        jax.jit(jttt.dot_product_attention).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert kernels_run == []


def run_python(program):
    """Runs a program on the CPU, with no interpreter of Triton's asked for."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment | {"JAX_PLATFORMS": "cpu"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.oldest
def test_kernels_asked_for_by_name_where_nothing_runs_them():
    run_python("""
import jax, jax.numpy as jnp, jttt

x = jnp.ones((1, 3, 1, 8))
for run in (lambda f: f(x), lambda f: jax.jit(f)(x), lambda f: jax.grad(lambda x: f(x).sum())(x)):
    try:
        run(lambda x: jttt.dot_product_attention(x, x, x, implementation="triton"))
    except ValueError as error:
        message = str(error)
        assert "implementation was 'triton', but the computation is lowered for cpu: expected an NVIDIA" in message
        assert "TRITON_INTERPRET=1" in message
    else:
        raise AssertionError("no error")
""")


@pytest.mark.oldest
def test_import_is_light():
    run_python("""
import sys, jttt

assert not {"triton", "jax_triton"} & set(sys.modules)
""")


def test_works_without_triton():
    run_python("""
import sys

sys.modules["triton"] = sys.modules["jax_triton"] = None
import jax, jax.numpy as jnp, jttt

x = jnp.ones((1, 3, 1, 8))
loss = lambda x: jttt.dot_product_attention(x, x, x).sum()
assert jnp.isfinite(jax.grad(lambda x: jax.grad(loss)(x).sum())(x)).all()
""")
