"""What hides keys, biases, soft caps and sinks, to second order, in both implementations."""

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
from tests import dense, jaxprs, plain
from tests.dense import Sizes
from tests.test_kernels import blocks_of

# Plain formulas run in float64, where rounding hides nothing.
DTYPES = {"xla": np.float64, "triton": np.float32}
TOLERANCES = {"xla": 1e-12, "triton": 2e-6}

BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])

# Two and three blocks of sixteen, the last one not whole.
SIZES = Sizes(B=2, T=24, S=40, N=2, K=1, H=5, E=7)
KINDS = dense.kinds(SIZES.N, SIZES.T, SIZES.S)

SMALL = Sizes(B=2, T=17, S=19, N=2, K=1, H=3, E=4)
KINDS_OF_SMALL = dense.kinds(SMALL.N, SMALL.T, SMALL.S)


def attend(implementation):
    return functools.partial(jttt.dot_product_attention, implementation=implementation, return_residual=True)


def running(implementation):
    """Float64 for plain formulas, small blocks for kernels."""
    return jax.enable_x64(True) if implementation == "xla" else blocks_of(16, 16)


def orders(implementation, arguments, wanted=dense.INPUTS):
    with running(implementation):
        return dense.orders(attend(implementation), dense.floats(arguments, DTYPES[implementation]), wanted)


def check(mine, exact, arguments, tolerance):
    assert {name: x.shape for name, x in mine.items()} == {name: x.shape for name, x in exact.items()}
    plain.assert_close(mine, exact, tolerance)
    rows = np.swapaxes(~dense.seen(arguments).any(-1), 1, 2)
    for name in mine.keys() & {"output", "d_query", "g_query"}:
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

    def documents(length):
        return np.stack([dense.documents(length, *np.sort(generator.random(3))) for _ in range(B)])

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
        "documents": lambda: dict(query_segment_ids=documents(T), key_value_segment_ids=documents(S)),
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
    B, T, S, N, *_ = sizes = draw(st.sampled_from([SIZES, Sizes(B=1, T=33, S=20, N=4, K=2, H=4, E=2)]))
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


@pytest.mark.slow
@settings(max_examples=12)
@given(problems())
def test_any_combination_in_plain_formulas(arguments):
    check(orders("xla", arguments), dense.exact_orders(arguments), arguments, TOLERANCES["xla"])


@pytest.mark.slow
@settings(max_examples=6)
@given(problems())
def test_any_combination_in_kernels(arguments):
    check(orders("triton", arguments), dense.exact_orders(arguments), arguments, TOLERANCES["triton"])


@pytest.mark.oldest
def test_blocks_of_the_table():
    arguments = SIZES.draw() | KINDS["everything"]
    check(dense.orders(attend("triton"), arguments), exact_orders("everything"), arguments, TOLERANCES["triton"])


@BOTH
def test_nothing_is_promoted_to_more_axes(implementation):
    """Where JAX is told to refuse that, arguments of every kind are still taken."""
    arguments = SMALL.draw() | KINDS_OF_SMALL["everything"]
    with jax.numpy_rank_promotion("raise"):
        dense.orders(attend(implementation), arguments)


def test_order_three():
    with jax.enable_x64(True):
        arguments = Sizes(B=2, T=4, S=7, N=2, K=1, H=2, E=3).draw() | dense.kinds(N=2, T=4, S=7)["everything"]
        arguments = dense.floats(arguments, np.float64)
        others = {name: x for name, x in arguments.items() if name not in dense.INPUTS}

        def function(*inputs):
            return attend("xla")(**dict(zip(dense.INPUTS, inputs, strict=True)), **others)

        check_grads(jax.jit(function), [arguments[name] for name in dense.INPUTS], order=3, modes=["rev"])


# Faults that other libraries have shipped, by their numbers in the list of known faults. Number 1, a
# window that acts only beside a mask, is `test_each_kind`.


@BOTH
def test_2_nothing_beyond_the_lengths_matters(implementation):
    arguments = SIZES.draw() | dict(query_seq_lengths=np.array([24, 9], np.int32),
                                    key_value_seq_lengths=np.array([18, 0], np.int32))
    garbage = {name: x.copy() for name, x in arguments.items()}
    garbage["query"][1, 9:] = 1e4
    for name in ("key", "value"):
        garbage[name][0, 18:] = garbage[name][1] = -1e4
    mine, exact = orders(implementation, garbage), orders(implementation, arguments)
    for name in exact:
        np.testing.assert_array_equal(mine[name], exact[name], err_msg=name)


@BOTH
@pytest.mark.parametrize("axes", ["", "BN", "BT", "BS", "NT", "NS", "TS", "BNTS"])
def test_3_gradient_of_a_bias_with_only_some_axes(axes, implementation):
    """Any three axes are there or not in every combination. What is added up mostly cancels."""
    shape = [getattr(SMALL, axis) if axis in axes else 1 for axis in "BNTS"]
    arguments = SMALL.draw() | dict(bias=np.random.default_rng(0).standard_normal(shape, np.float32))
    mine = orders(implementation, arguments, ("bias",))
    check(mine, dense.exact_orders(arguments, ("bias",)), arguments, 20 * TOLERANCES[implementation])


@pytest.mark.parametrize(("implementation", "dtype"), [
    ("triton", "float16"), ("triton", "bfloat16"), ("xla", "float16"), ("xla", "bfloat16")])
def test_3_gradient_of_a_bias_of_another_dtype(implementation, dtype):
    bias = np.random.default_rng(0).standard_normal((SMALL.N, SMALL.T, 1), np.float32).astype(dtype)
    arguments = SMALL.draw() | dict(bias=bias)
    mine = dense.orders(attend(implementation), arguments)
    assert all(mine[name].dtype == dtype for name in ("d_bias", "g_bias"))
    check(mine, dense.exact_orders(arguments), arguments, float(jnp.finfo(dtype).eps))


@pytest.mark.oldest
@BOTH
def test_5_integers_among_the_differentiated_arguments(implementation):
    arguments = SMALL.draw() | KINDS_OF_SMALL["everything"]
    arguments = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}

    def gradient(arguments):
        (output, lse), pull = jax.vjp(lambda arguments: attend(implementation)(**arguments), arguments)
        return pull((jnp.cos(output), jnp.cos(lse)))[0]

    first, pull = jax.vjp(gradient, arguments)
    (second,) = pull(first)
    for gradients in (first, second):
        for name, x in gradients.items():
            if name in dense.INPUTS:
                assert np.abs(x).sum() > 0, name
            else:
                assert x.dtype == jax.dtypes.float0, name


@BOTH
@pytest.mark.parametrize(("dtype", "hides"), [
    ("float32", "-inf"), ("float16", "-inf"), ("float32", "min"), ("float16", "min")])
def test_6_biases_that_hide(dtype, hides, implementation):
    mine, hidden = check_hiding_bias(dtype, hides, implementation, row_seen=True)
    for name in ("d_bias", "g_bias"):
        assert not np.any(np.asarray(mine[name])[hidden]), name


@BOTH
@pytest.mark.parametrize(("dtype", "hides"), [
    ("float32", "-inf"), ("float16", "-inf"), ("float32", "min"), ("float16", "min")])
def test_6_biases_that_hide_whole_rows(dtype, hides, implementation):
    check_hiding_bias(dtype, hides, implementation, row_seen=False)


def check_hiding_bias(dtype, hides, implementation, row_seen):
    """Every row sees a key, or one sees none."""
    generator = np.random.default_rng(0)
    hidden = generator.random((17, 19)) < 0.5
    hidden[:, 0] = False
    if not row_seen:
        hidden[5] = True
    low = -np.inf if hides == "-inf" else np.finfo(dtype).min
    bias = np.where(hidden, low, generator.standard_normal(hidden.shape))
    arguments = dense.floats(Sizes(B=1, T=17, S=19, N=1, K=1, H=3, E=4).draw() | dict(bias=bias), dtype)
    with blocks_of(16, 16):
        mine = dense.orders(attend(implementation), arguments)
    tolerance = TOLERANCES["triton"] if dtype == "float32" else 2 * float(np.finfo(dtype).eps)
    check(mine, dense.exact_orders(arguments), arguments, tolerance)
    return mine, hidden


# Equal to jax.nn, wherever both define the result: its own grid of arguments.


@pytest.mark.parametrize("short", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("window", [None, (3, 2)], ids=["everywhere", "window"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "mask"])
@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "bias"])
@pytest.mark.parametrize("K", [4, 2])
def test_equal_to_jax_nn(K, biased, masked, is_causal, window, short):
    B, T, S, N, *_ = sizes = Sizes(B=2, T=10, S=12, N=4, K=K, H=4, E=4)
    generator = np.random.default_rng(0)
    hiding = dict(is_causal=is_causal, local_window_size=window)
    if masked:
        hiding["mask"] = generator.random((B, 1, T, S)) < 0.7
    if short:
        hiding |= dict(query_seq_lengths=np.array([T, 9], np.int32), key_value_seq_lengths=np.array([7, S], np.int32))
    inputs = sizes.draw()
    if biased:
        inputs["bias"] = generator.standard_normal((1, N, T, S), np.float32)
    # jax.nn averages value in rows that see nothing.
    weights = np.swapaxes(dense.seen(inputs | hiding).any(-1), 1, 2)[..., None] * inputs["query"]

    def result_and_gradient(function):
        def loss(inputs):
            output = function(**inputs, **hiding, implementation="xla")
            return jnp.sum(jnp.sin(output) * weights), output * (weights != 0)

        gradient, output = jax.grad(loss, has_aux=True)(inputs)
        return gradient | dict(output=output)

    plain.assert_close(result_and_gradient(jttt.dot_product_attention),
                       result_and_gradient(jax.nn.dot_product_attention), 1e-6)


# Under vmap, with any mixture of what is mapped and what is not.

MAPPED = [
    ("key_value_seq_lengths",),
    ("query", "mask", "query_offset"),
    ("query", "key", "value", "bias", "key_start", "query_segment_ids"),
]


def mapped_arguments(mapped):
    """Arguments with a leading axis of two in those that are mapped, their in_axes, and each of the two."""
    sizes = Sizes(B=2, T=9, S=19, N=2, K=1, H=3, E=4)
    one = sizes.draw() | dense.kinds(sizes.N, sizes.T, sizes.S)["everything"]
    one["key_value_seq_lengths"] = np.array([12, 19], np.int32)
    other = {name: np.flip(x) if name in mapped else x for name, x in one.items()}
    both = {name: np.stack([x, other[name]]) if name in mapped else x for name, x in one.items()}
    return both, {name: 0 if name in mapped else None for name in one}, (one, other)


@BOTH
@pytest.mark.parametrize("mapped", MAPPED, ids=" ".join)
def test_vmap_of_derivatives(mapped, implementation):
    both, axes, each = mapped_arguments(mapped)
    with running(implementation):
        run = jax.vmap(functools.partial(dense.orders, attend(implementation)), (axes,))
        mine = run(dense.floats(both, DTYPES[implementation]))
    for i, arguments in enumerate(each):
        check({name: x[i] for name, x in mine.items()}, dense.exact_orders(arguments), arguments,
              TOLERANCES[implementation])


@BOTH
def test_derivatives_of_vmap(implementation):
    """The gradient of what is not mapped is a sum over what is."""
    mapped = ("query", "value", "mask", "key_value_seq_lengths")
    both, axes, each = mapped_arguments(mapped)

    def batched(**arguments):
        return jax.vmap(lambda arguments: attend(implementation)(**arguments), (axes,))(arguments)

    def loop(**inputs):
        results = [dense.attention(
            **{name: x[i] if name in mapped else x for name, x in inputs.items()}, seen=dense.seen(arguments),
            **{name: arguments[name] for name in dense.OPTIONS}) for i, arguments in enumerate(each)]
        return [jnp.stack(x) for x in zip(*results, strict=True)]

    with running(implementation):
        mine = dense.orders(batched, dense.floats(both, DTYPES[implementation]))
    with jax.enable_x64(True):
        exact = dense.orders(loop, dense.floats({name: both[name] for name in dense.INPUTS}, np.float64))
    plain.assert_close(mine, exact, TOLERANCES[implementation])


# What is left out, read from jaxprs.


def meta_gradient(arguments, differentiated):
    """The gradient of a curved function of the gradient, and its inputs."""
    inputs = {name: arguments[name] for name in differentiated}
    others = {name: x for name, x in arguments.items() if name not in differentiated}

    def loss(inputs):
        return jnp.sum(jnp.sin(jttt.dot_product_attention(**inputs, **others)))

    def meta(inputs):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.grad(loss)(inputs).values())

    return jax.grad(meta), inputs


@pytest.mark.oldest
def test_gradient_of_a_bias_is_made_only_if_asked_for():
    arguments = SMALL.draw() | KINDS_OF_SMALL["bias"]
    for differentiated, asked in ((("query", "key", "value"), False), (("query", "bias"), True)):
        passes = jaxprs.passes(*meta_gradient(arguments, differentiated))
        assert [x.params["name"] for x in passes] == ["forward", "backward", "tangent", "double_backward", "backward"]
        made = [x.params["wanted"] for x in passes]
        assert [("d_bias" in x or "g_bias" in x) for x in made] == [False, asked, False, asked, asked]


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["mask", "mask_of_keys"])
def test_a_mask_is_not_expanded(kind):
    mask = KINDS_OF_SMALL[kind]["mask"]
    expected = (1,) * (4 - mask.ndim) + mask.shape
    differentiate, inputs = meta_gradient(SMALL.draw() | dict(mask=mask), ("query", "key", "value"))
    for equation in jaxprs.passes(differentiate, inputs):
        assert jaxprs.operands(equation)["mask"].shape == expected
    stacked = {name: np.stack([x, x]) for name, x in inputs.items()}
    for equation in jaxprs.passes(jax.vmap(differentiate), stacked):
        assert jaxprs.operands(equation)["mask"].shape == (1, *expected)


@pytest.mark.oldest
@pytest.mark.parametrize(("kind", "expected"), [
    ("window", set()), ("causal_window", set()), ("offset", set()),
    ("traced_offset", {"key_start", "key_end"}), ("query_lengths", {"key_start", "key_end"}),
    ("documents", {"query_segments", "key_segments"}), ("mask", {"mask", "mask_summary"}),
])
def test_operands_are_only_what_is_needed(kind, expected):
    differentiate, inputs = meta_gradient(SMALL.draw() | KINDS_OF_SMALL[kind], ("query", "key", "value"))
    for equation in jaxprs.passes(differentiate, inputs):
        assert set(jaxprs.operands(equation)) & set(masks.OPERANDS) == expected


# What hides a tile.


def folded(arguments):
    """`(band, operands)` as the implementations get them."""
    nothing = jnp.zeros((1, 1, 1, 1))
    with mock.patch.object(derivatives, "attention", return_value=dict(output=nothing, lse=nothing)) as attention:
        jttt.dot_product_attention(**arguments)
    (spec, inputs), _ = attention.call_args
    return spec.band, {name: inputs[name] for name in masks.OPERANDS}


def tiles(seen, rows, columns):
    """`[B, N, blocks of queries, blocks of keys]`: whether anything and whether all of a whole tile is visible."""
    B, N, T, S = seen.shape
    padded = np.pad(seen, ((0, 0), (0, 0), (0, -T % rows), (0, -S % columns)))
    tiled = padded.reshape(B, N, -(-T // rows), rows, -(-S // columns), columns)
    return tiled.any((3, 5)), tiled.all((3, 5))


BLOCKS = st.sampled_from([16, 64])
LENGTHS = st.sampled_from([1, 32, 70])


@settings(max_examples=60)
@given(st.data(), LENGTHS, LENGTHS, BLOCKS, BLOCKS)
def test_status_of_tiles(data, T, S, rows, columns):
    B, _, _, N, *_ = sizes = Sizes(B=2, T=T, S=S, N=2, K=1, H=1, E=1)
    arguments = sizes.draw() | data.draw(hidden_keys(B, N, T, S))
    seen = dense.seen(arguments)
    band, hidden = folded(arguments)
    visible = masks.visible(band, hidden, T, S)
    np.testing.assert_array_equal(np.broadcast_to(True if visible is None else visible, seen.shape), seen)

    some, every = tiles(seen, rows, columns)
    status = np.broadcast_to(masks.tile_status(band, hidden, T, S, rows, columns), some.shape)
    assert every[status == masks.FULL].all()
    assert not some[status == masks.HIDDEN].any()
    check_block_lists(masks.tile_status(band, hidden, T, S, rows, columns))


def check_block_lists(status):
    status = np.asarray(status)
    *batch, heads, query_tiles, key_tiles = status.shape
    order, counts = masks.key_blocks(jnp.asarray(status))
    assert order.shape == (*batch, heads, query_tiles, key_tiles, 1)
    for place in np.ndindex(status.shape[:-1]):
        check_list(order[place], counts[place], status[place])

    # All heads of a batch share a key head here; unless the mask is that of all heads, each has tiles of its own.
    order, counts = masks.query_blocks(jnp.asarray(status), 1)
    assert order.shape == (*batch, 1, key_tiles, query_tiles, heads)
    for *place, _, block in np.ndindex(order.shape[:-2]):
        check_list(order[*place, 0, block], counts[*place, 0, block], status[*place, :, :, block].T)


def check_list(order, counts, status):
    """Of one block: `status` of the tiles `[other block, member]` that it meets."""
    full, mixed = (np.flatnonzero(status == kind) for kind in (masks.FULL, masks.MIXED))
    np.testing.assert_array_equal(counts, [len(full), len(mixed)])
    np.testing.assert_array_equal(order.ravel()[:len(full) + len(mixed)], [*full, *mixed])


@pytest.mark.parametrize("kind", [
    "query_lengths", "key_lengths", "window", "causal_window", "offset", "offset_before_keys", "traced_offset",
    "key_start", "key_end", "documents", "mask", "mask_of_each", "mask_of_keys"])
def test_no_tile_is_mixed_without_need(kind):
    T, S = 100, 150
    arguments = Sizes(B=2, T=T, S=S, N=2, K=1, H=1, E=1).draw() | dense.kinds(2, T, S)[kind]
    some, every = tiles(dense.seen(arguments), 32, 16)
    status = masks.tile_status(*folded(arguments), T, S, 32, 16)
    np.testing.assert_array_equal(np.broadcast_to(status, some.shape), some.astype(int) + every)


@pytest.mark.parametrize("shape", [(2, 1, 40, 50), (1, 2, 16, 33), (1, 1, 1, 20), (1, 1, 20, 1), (1, 1, 1, 1)], ids=str)
def test_summary_of_a_mask(shape):
    mask = dense.mask(np.random.default_rng(0), *shape)
    # Whole where it ends within a square.
    padded = np.pad(mask, [(0, 0), (0, 0), *((0, -size % 16 if size > 1 else 15) for size in shape[2:])], mode="edge")
    some, every = tiles(padded, 16, 16)
    np.testing.assert_array_equal(masks.summarise(jnp.asarray(mask)), some.astype(int) + every)


# Work that is not done.

BLOCK_OF_EACH = np.repeat(np.arange(3, dtype=np.int32), 16)

HIDDEN_BLOCKS = {
    "window": dict(local_window_size=9),
    "causal_window": dict(local_window_size=(9, 0), is_causal=True),
    "traced_offset": dict(is_causal=True, query_offset=np.array([0, -20], np.int32)),
    "key_lengths": dict(key_value_seq_lengths=np.array([32, 10], np.int32)),
    "query_lengths": dict(query_seq_lengths=np.array([48, 20], np.int32)),
    "key_ranges": dict(key_start=16 * BLOCK_OF_EACH, key_end=16 * BLOCK_OF_EACH + 16),
    "documents": dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), np.stack([BLOCK_OF_EACH] * 2)),
    "mask": dict(mask=BLOCK_OF_EACH[:, None] == BLOCK_OF_EACH),
}


# What holds NaN in its last block, and what is made from blocks of the other side alone.
SIDES = {
    "keys": (("key", "value", "t_key", "t_value"), ("output", "d_query", "g_query", "g_d_output")),
    "queries": (("query", "d_output", "t_query"), ("d_key", "d_value", "g_key", "g_value")),
}


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("kind", HIDDEN_BLOCKS)
def test_hidden_blocks_are_never_visited(kind):
    """NaN in a block reaches all that is made with it, for 0 · NaN is NaN."""
    inputs = Sizes(B=2, T=48, S=48, N=1, K=1, H=4, E=4).draw()
    arrays = inputs | {f"t_{name}": x for name, x in inputs.items()} | dict(d_output=inputs["query"])
    some, _ = tiles(dense.seen(inputs | HIDDEN_BLOCKS[kind]), 16, 16)
    meets_last = {"keys": some[:, 0, :, 2], "queries": some[:, 0, 2, :]}

    def attention(inputs):
        return jttt.dot_product_attention(**inputs, **HIDDEN_BLOCKS[kind], implementation="triton")

    def gradients(inputs, d_output):
        output, pull = jax.vjp(attention, inputs)
        return pull(d_output)[0], output

    @jax.jit
    def linear_orders(arrays):
        arguments, direction = ({name: arrays[prefix + name] for name in inputs} for prefix in ("", "t_"))
        first, pull, output = jax.vjp(gradients, arguments, arrays["d_output"], has_aux=True)
        second, g_d_output = pull(direction)
        return ({f"d_{name}": x for name, x in first.items()} | {f"g_{name}": x for name, x in second.items()}
                | dict(output=output, g_d_output=g_d_output))

    with blocks_of(16, 16):
        clean = linear_orders(arrays)
        for side, (poisoned, made) in SIDES.items():
            results = linear_orders({name: np.where(np.arange(48)[:, None, None] >= 32, np.nan, x).astype(x.dtype)
                                     if name in poisoned else x for name, x in arrays.items()})
            for name in made:
                blocks, expected = (x[name].reshape(2, 3, 16, 4) for x in (results, clean))
                np.testing.assert_array_equal(blocks[~meets_last[side]], expected[~meets_last[side]], err_msg=name)
                # That a visit does spread it; rows that see nothing drop what reaches them either way.
                assert np.isnan(blocks[meets_last[side]]).all() or name == "g_d_output", name
