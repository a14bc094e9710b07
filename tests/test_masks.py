"""What hides keys, biases, soft caps and sinks, to second order, in both implementations."""

import contextlib
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jttt
from jttt import derivatives, masks
from jttt.spec import Band
from tests import dense, jaxprs, plain
from tests.dense import Sizes
from tests.test_kernels import blocks_of

# Plain formulas run in float64, where rounding hides nothing.
DTYPES = {"xla": np.float64, "triton": np.float32}
TOLERANCES = {"xla": 1e-12, "triton": 2e-6}

BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])

# Lengths of two to three blocks of sixteen, the last one not whole.
SIZES = Sizes(B=2, T=35, S=40, N=2, K=1, H=5, E=7)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)


def attend(implementation):
    return functools.partial(jttt.dot_product_attention, implementation=implementation, return_residual=True)


def running(implementation):
    """Float64 for plain formulas, small blocks for kernels."""
    return jax.enable_x64(True) if implementation == "xla" else blocks_of(16, 16)


def orders(implementation, arguments):
    with running(implementation):
        return dense.orders(attend(implementation), dense.floats(arguments, DTYPES[implementation]))


def check(mine, exact, arguments, tolerance):
    assert {name: x.shape for name, x in mine.items()} == {name: x.shape for name, x in exact.items()}
    plain.assert_close(mine, exact, tolerance)
    function, _ = dense.closed(arguments)
    rows = np.swapaxes(~function.keywords["seen"].any(-1), 1, 2)
    for name in ("output", "d_query", "g_query"):
        assert not np.any(np.asarray(mine[name])[rows]), f"{name} of queries that see nothing"


# Every kind, alone and with others.


@functools.cache
def exact_orders(kind):
    return dense.exact_orders(SIZES.draw() | KINDS[kind])


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind, implementation):
    arguments = SIZES.draw() | KINDS[kind]
    check(orders(implementation, arguments), exact_orders(kind), arguments, TOLERANCES[implementation])


@st.composite
def hidden_keys(draw, B, N, T, S):
    """Any subset of what hides keys, in any shape that broadcasts."""
    generator = np.random.default_rng(draw(st.integers(0, 999)))

    def integers(low, high, *shape):
        return generator.integers(low, high, shape, np.int32)

    def broadcast(make, *shape):
        """What `make` makes of a shape that broadcasts to this one, perhaps with fewer axes."""
        x = make(*(size if draw(st.booleans()) else 1 for size in shape))
        fewer = tuple(itertools.dropwhile((1).__eq__, x.shape))
        return x.reshape(fewer) if draw(st.booleans()) else x

    kinds = {
        "causal": lambda: dict(is_causal=True),
        "window": lambda: dict(local_window_size=tuple(map(int, integers(0, S, 2)))),
        "offset": lambda: dict(query_offset=int(integers(-T, S, 1)[0])),
        "traced_offset": lambda: dict(query_offset=broadcast(functools.partial(integers, -T, S), B)),
        "key_start": lambda: dict(key_start=broadcast(functools.partial(integers, -2, S // 2 + 1), B, T)),
        "key_end": lambda: dict(key_end=broadcast(functools.partial(integers, S // 2, S + 2), B, T)),
        "query_lengths": lambda: dict(query_seq_lengths=integers(0, T + 1, B)),
        "key_lengths": lambda: dict(key_value_seq_lengths=integers(0, S + 1, B)),
        "documents": lambda: dict(query_segment_ids=dense.documents(generator, B, T),
                                  key_value_segment_ids=dense.documents(generator, B, S)),
        "segments": lambda: dict(query_segment_ids=integers(-1, 2, B, T), key_value_segment_ids=integers(-1, 2, B, S)),
        "mask": lambda: dict(mask=broadcast(functools.partial(dense.mask, generator), B, N, T, S)),
    }
    arguments = {}
    for kind in sorted(draw(st.sets(st.sampled_from(sorted(kinds))))):
        arguments |= kinds[kind]()
    return arguments


@st.composite
def problems(draw):
    """All of it: sizes, what hides keys, bias, soft cap, sinks."""
    K = draw(st.integers(1, 2))
    sizes = Sizes(B=draw(st.integers(1, 2)), T=draw(st.integers(1, 35)), S=draw(st.integers(1, 40)),
                  N=K * draw(st.integers(1, 2)), K=K, H=draw(st.integers(1, 6)), E=draw(st.integers(1, 6)))
    B, T, S, N, *_ = sizes
    arguments = sizes.draw() | draw(hidden_keys(B, N, T, S))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in (B, N, T, S)]
        arguments["bias"] = generator.standard_normal(shape, np.float32)
    if draw(st.booleans()):
        arguments["sinks"] = generator.standard_normal(N, np.float32)
    if draw(st.booleans()):
        arguments["logits_soft_cap"] = draw(st.sampled_from([0.5, 3.0]))
    return arguments


@settings(max_examples=20)
@given(problems())
def test_any_combination_in_plain_formulas(arguments):
    check(orders("xla", arguments), dense.exact_orders(arguments), arguments, TOLERANCES["xla"])


@settings(max_examples=8)
@given(problems())
def test_any_combination_in_kernels(arguments):
    check(orders("triton", arguments), dense.exact_orders(arguments), arguments, TOLERANCES["triton"])
