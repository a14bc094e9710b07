"""Attention with every argument of `jttt.dot_product_attention`, written from its docstring alone.

What a query sees is one boolean array, made with numpy from the definition of each argument; scores
are dense, and JAX differentiates them. Nothing here calls jttt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What can be differentiated.
INPUTS = ("query", "key", "value", "bias", "sinks")

OPTIONS = ("scale", "logits_soft_cap")

Arguments = Mapping[str, Any]


class Sizes(NamedTuple):
    """Of each axis, by its letter."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    E: int

    def draw(self) -> dict[str, np.ndarray]:
        """Normal query, key and value."""
        B, T, S, N, K, H, E = self
        generator = np.random.default_rng(1)
        shapes = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, E))
        return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def kinds(N: int, T: int, S: int) -> dict[str, Arguments]:
    """Arguments of each kind by name, for a batch of two; `everything` has all of them."""
    generator = np.random.default_rng(0)

    def integers(*x: int) -> np.ndarray:
        return np.array(x, np.int32)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32)

    start = generator.integers(0, S, (2, T), np.int32)
    end = start + generator.integers(0, S, (2, T), np.int32)
    packed = dict(query_segment_ids=np.stack([documents(T, 0.7, 0.9), documents(T, 0.3, 0.6, 1)]),
                  key_value_segment_ids=np.stack([documents(S, 0.6, 0.9), documents(S, 0.4, 0.7, 1)]))
    # The first two thirds of the queries see nothing.
    before_keys = dict(is_causal=True, query_offset=-(2 * T // 3))
    return {
        "query_lengths": dict(query_seq_lengths=integers(T, T // 3)),
        "key_lengths": dict(key_value_seq_lengths=integers(S // 2, 0)),
        "window": dict(local_window_size=T // 5),
        "causal_window": dict(local_window_size=(T // 3, 2), is_causal=True),
        "offset": dict(is_causal=True, query_offset=S - T),
        "offset_before_keys": before_keys,
        "traced_offset": dict(local_window_size=(S // 3, 0), query_offset=integers(S - T, -T // 2)),
        "key_start": dict(key_start=start[:1]),
        "key_end": dict(key_end=end[:, :1]),
        "key_ranges": dict(key_start=start, key_end=end),
        "documents": packed,
        "unsorted_segments": dict(query_segment_ids=generator.integers(-1, 3, (2, T), np.int32),
                                  key_value_segment_ids=generator.integers(-1, 3, (2, S), np.int32)),
        "mask": dict(mask=mask(generator, T, S)),
        "mask_of_each": dict(mask=mask(generator, 2, N, T, S)),
        "mask_of_keys": dict(mask=mask(generator, 2, 1, 1, S)),
        "bias": dict(bias=normal(N, T, S)),
        "bias_of_keys": dict(bias=normal(2, 1, 1, S)),
        "soft_cap": dict(logits_soft_cap=1.5),
        "sinks": dict(sinks=normal(N), **before_keys),
        "everything": dict(
            query_seq_lengths=integers(T, T - T // 7), key_value_seq_lengths=integers(S - S // 9, S),
            local_window_size=(S // 2, S // 4), is_causal=True, query_offset=integers(S - T, S // 4),
            key_start=start // 4, mask=mask(generator, T, S) | (np.arange(S) % 3 == 0), bias=normal(N, T, S),
            sinks=normal(N), logits_soft_cap=1.5, scale=0.7, **packed),
    }


def mask(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Squares of sixteen that are True, False, or mixed, so that whole tiles are hidden or visible."""
    squares = generator.integers(0, 3, (*shape[:-2], *(-(-size // 16) for size in shape[-2:])))
    squares = squares.repeat(16, -2).repeat(16, -1)[..., :shape[-2], :shape[-1]]
    return np.where(squares == 1, generator.random(shape) < 0.5, squares == 2)


def documents(length: int, *ends: float) -> np.ndarray:
    """Ids of packed documents, which end at these parts of the length, and of padding behind the last."""
    ids = np.searchsorted(np.array(ends) * length, np.arange(length), side="right").astype(np.int32)
    return np.where(ids == len(ends), -1, ids)


def visible(B: int, N: int, T: int, S: int, *, mask=None, is_causal=False, query_seq_lengths=None,
            key_value_seq_lengths=None, local_window_size=None, query_offset=0, key_start=None, key_end=None,
            query_segment_ids=None, key_value_segment_ids=None) -> np.ndarray:
    """Boolean `[B, N, T, S]`: True where query t sees key s."""
    t, s = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((B, N, T, S), bool)

    def per_batch(x) -> np.ndarray:
        return np.broadcast_to(x, B)[:, None, None, None]

    def per_query(x) -> np.ndarray:
        return np.broadcast_to(x, (B, T))[:, None, :, None]

    position = t + per_batch(query_offset)
    if is_causal:
        seen &= s <= position
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        seen &= (position - left <= s) & (s <= position + right)
    if query_seq_lengths is not None:
        seen &= t < per_batch(query_seq_lengths)
    if key_value_seq_lengths is not None:
        seen &= s < per_batch(key_value_seq_lengths)
    if key_start is not None:
        seen &= s >= per_query(key_start)
    if key_end is not None:
        seen &= s < per_query(key_end)
    if query_segment_ids is not None:
        ids = per_query(query_segment_ids)
        seen &= (ids == np.broadcast_to(key_value_segment_ids, (B, S))[:, None, None, :]) & (ids >= 0)
    if mask is not None:
        seen &= mask
    return seen


def seen(arguments: Arguments) -> np.ndarray:
    """`visible`, of all the arguments of an attention call."""
    (B, T, N, _), S = arguments["query"].shape, arguments["key"].shape[1]
    return visible(B, N, T, S, **{name: x for name, x in arguments.items() if name not in (*INPUTS, *OPTIONS)})


def attention(query, key, value, bias=None, sinks=None, *, seen, scale=None, logits_soft_cap=None
              ) -> tuple[jax.Array, jax.Array]:
    """`(output, lse)` of arrays with a batch axis, where `seen` is what `visible` returns."""
    (B, T, N, H), K = query.shape, key.shape[2]
    key, value = jnp.repeat(key, N // K, axis=2), jnp.repeat(value, N // K, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * (1 / math.sqrt(H) if scale is None else scale)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if bias is not None:
        seen = seen & (bias > -jnp.inf)
        scores = scores + jnp.where(bias > -jnp.inf, bias, 0)
    if sinks is not None:  # One more key, which everyone sees and whose value is zero.
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1))], axis=-1)
        seen = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
        value = jnp.pad(value, ((0, 0), (0, 1), (0, 0), (0, 0)))
    # What is not seen is replaced before exp and log too, or autodiff makes 0 · ∞ of it.
    empty = ~seen.any(-1)
    peak = jax.lax.stop_gradient(jnp.where(empty, 0, jnp.max(jnp.where(seen, scores, -jnp.inf), -1)))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - peak[..., None], 0)), 0)
    total = jnp.where(empty, 1, jnp.sum(weights, -1))
    output = jnp.einsum("bnts,bsnh->btnh", weights / total[..., None], value)
    return output, jnp.swapaxes(jnp.where(empty, -jnp.inf, peak + jnp.log(total)), 1, 2)


def orders(function: Callable, arguments: Arguments, wanted: Sequence[str] = INPUTS) -> dict[str, jax.Array]:
    """Order 0, 1 and 2 of `function(**arguments) -> (output, lse)` in those arguments that are wanted, by name.

    The losses are curved, so that every cotangent reaches every rule; also that of the log-sum-exp
    of a row that sees nothing, which must lead nowhere.
    """
    inputs = {name: x for name, x in arguments.items() if name in wanted}
    wide = jnp.result_type(jnp.float32, *inputs.values())
    arrays = {name: x for name, x in arguments.items() if name not in wanted and hasattr(x, "dtype")}
    static = {name: x for name, x in arguments.items() if not hasattr(x, "dtype")}

    def direction(name, x):
        return jnp.asarray(np.random.default_rng([*name.encode()]).standard_normal(x.shape, np.float32), wide)

    def curved_sum(named):
        return sum(jnp.sum(direction(name, x) * jnp.sin(x.astype(wide))) for name, x in named.items())

    def loss(inputs, arrays):
        output, lse = function(**inputs, **arrays, **static)
        empty = lse == -jnp.inf
        results = dict(output=output, lse=jnp.where(empty, 0, lse))
        pulled = jnp.sum(jnp.where(empty, direction("lse", lse) * lse, 0))
        return curved_sum(results) + pulled, results | dict(empty=empty)

    def meta(inputs, arrays):
        gradients, results = jax.grad(loss, has_aux=True)(inputs, arrays)
        first = {f"d_{name}": x for name, x in gradients.items()}
        return curved_sum(first), results | first

    second, results = jax.jit(jax.grad(meta, has_aux=True))(inputs, arrays)
    return results | {f"g_{name}": x for name, x in second.items()}


def floats(arguments: Arguments, dtype: Any) -> Arguments:
    """The arguments with floating-point arrays of this dtype."""
    return {name: x.astype(dtype) if name in INPUTS else x for name, x in arguments.items()}


def exact_orders(arguments: Arguments, wanted: Sequence[str] = INPUTS) -> dict[str, np.ndarray]:
    """`orders` of `attention` in float64, of the very values of the arguments."""
    inputs = floats({name: x for name, x in arguments.items() if name in INPUTS}, np.float64)
    options = {name: x for name, x in arguments.items() if name in OPTIONS}
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _orders_of_attention(inputs, wanted, seen=seen(arguments), **options))


@functools.partial(jax.jit, static_argnums=1)
def _orders_of_attention(inputs, wanted, **others):
    return orders(functools.partial(attention, **others), inputs, wanted)
