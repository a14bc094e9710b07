"""Checks of the public functions' arguments, at trace time.

Each error names the argument, what it was and what is expected.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jttt import passes

MAX_WIDTH = 256

DTYPES = ("float16", "bfloat16", "float32", "float64")


def checked_inputs(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = dict(query=query, key=key, value=value)
    for name, x in arrays.items():
        x = arrays[name] = jnp.asarray(x)
        axes = "[B, T, N, H] or [T, N, H]" if name == "query" else "[B, S, K, H] or [S, K, H]"
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} has shape {list(x.shape)}: expected {axes}")
        if x.ndim != arrays["query"].ndim:
            raise ValueError(f"{name} has {x.ndim} axes and query {arrays['query'].ndim}: expected "
                             "both with a batch axis or both without")
        if x.dtype.name not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype.name}: expected one of {', '.join(DTYPES)}")
        if x.dtype != arrays["query"].dtype:
            raise TypeError(f"{name} has dtype {x.dtype.name} and query "
                            f"{arrays['query'].dtype.name}: expected the same")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}: expected every axis of size 1 or more")
        if x.shape[-1] > MAX_WIDTH:
            raise NotImplementedError(
                f"{name} has head width {x.shape[-1]}: expected at most {MAX_WIDTH}")
    query, key, value = arrays.values()

    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(f"key has batch size {key.shape[0]} and query {query.shape[0]}: expected the same")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key has head width {key.shape[-1]} and query {query.shape[-1]}: expected the same")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value has shape {list(value.shape)} and key {list(key.shape)}: expected the "
                         "same batch, length and heads")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query has {query.shape[-2]} heads and key {key.shape[-2]}: expected a multiple "
                         "of key's heads")
    return query, key, value


def check_implementation(implementation: Any, dtype: jnp.dtype) -> None:
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation was {implementation!r}: expected 'triton', 'xla' or None")
    if implementation == "triton" and dtype == jnp.float64:
        raise TypeError("query has dtype float64 and implementation was 'triton': expected float16, "
                        "bfloat16 or float32; float64 runs with implementation='xla' or None")
    if implementation == "triton" and dtype == jnp.bfloat16 and passes.interprets_triton():
        raise NotImplementedError(
            "query has dtype bfloat16 and implementation was 'triton' under TRITON_INTERPRET=1: "
            "Triton's interpreter has no bfloat16 products; expected float16 or float32")


def scaled(query: jax.Array, scale: ArrayLike) -> jax.Array:
    scale = jnp.asarray(scale)
    if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale has shape {list(scale.shape)} and dtype {scale.dtype.name}: expected a "
                         "number or a floating-point scalar")
    wide = jnp.promote_types(query.dtype, scale.dtype)
    return (query.astype(wide) * scale.astype(wide)).astype(query.dtype)


def dense(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A bias or mask with four axes, those of size one unexpanded."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise TypeError(f"mask has dtype {x.dtype.name}: expected bool; pass what is added to the scores as bias")
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"bias has dtype {x.dtype.name}: expected a floating dtype")
    full = (1,) * (len(shape) - x.ndim) + x.shape
    if len(full) != len(shape) or any(
            size not in (1, expected) for size, expected in zip(full, shape, strict=True)):
        raise ValueError(f"{name} has shape {list(x.shape)}: expected it to broadcast to [B, N, T, S] = {list(shape)}")
    return x.reshape(full)


def integers(name: str, x: Any, shape: tuple[int, ...], has_batch: bool, broadcast: bool = False
              ) -> jax.Array | None:
    """An int32 array with the axes of `shape`, [B] or [B, length]; the batch axis may be left out
    where query has none, and with `broadcast` axes of size one stay unexpanded."""
    if x is None:
        return None
    plain, x = not hasattr(x, "dtype"), jnp.asarray(x)
    if plain and jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = x.astype(jnp.int32)  # Python's integers are int64 where float64 is on.
    if x.dtype != jnp.int32:
        raise TypeError(f"{name} has dtype {x.dtype.name}: expected int32")
    least = 0 if broadcast else len(shape) - (not has_batch)
    full = (1,) * (len(shape) - x.ndim) + x.shape
    sizes = [(1, expected) if broadcast else (expected,) for expected in shape]
    if not least <= x.ndim <= len(shape) or any(
            size not in allowed for size, allowed in zip(full, sizes, strict=True)):
        how = "it to broadcast to " if broadcast else ""
        axes = "[B]" if len(shape) == 1 else "[B, length]"
        raise ValueError(f"{name} has shape {list(x.shape)}: expected {how}{axes} = {list(shape)}")
    return x.reshape(full)


def checked_segments(query_ids: Any, key_ids: Any, B: int, T: int, S: int, has_batch: bool
                      ) -> tuple[jax.Array | None, jax.Array | None]:
    names = ("query_segment_ids", "key_value_segment_ids")
    for given, missing, name, other in ((query_ids, key_ids, *names), (key_ids, query_ids, *names[::-1])):
        if given is not None and missing is None:
            raise ValueError(f"{other} was None and {name} was given: expected both or neither")
    return (integers(names[0], query_ids, (B, T), has_batch), integers(names[1], key_ids, (B, S), has_batch))


def checked_window(window: Any) -> tuple[int, int]:
    sides = (window, window) if isinstance(window, numbers.Integral) else window
    try:
        left, right = map(operator.index, sides)
    except (TypeError, ValueError):
        left = right = -1
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size was {window!r}: expected an int of at least 0, or a pair "
                         "(left, right) of them")
    return left, right


def checked_soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    if not isinstance(cap, numbers.Real) or not 1e-30 <= cap <= 1e30:
        raise ValueError(f"logits_soft_cap was {cap!r}: expected a number from 1e-30 to 1e30, or None")
    return float(cap)


def checked_sinks(sinks: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {sinks.dtype.name}: expected a floating dtype")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [N] = [{heads}]")
    return sinks[None]
