"""The public function: checks, canonical form, and nothing else."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jttt import derivatives, masks, passes
from jttt.spec import AttentionSpec, Band, Implementation, default_precision

MAX_WIDTH = 256

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *, scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, query_offset: ArrayLike = 0,
    key_start: ArrayLike | None = None, key_end: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None, sinks: ArrayLike | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *, scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, query_offset: ArrayLike = 0,
    key_start: ArrayLike | None = None, key_end: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None, sinks: ArrayLike | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None, query_offset=0,
    key_start=None, key_end=None, query_segment_ids=None, key_value_segment_ids=None,
    logits_soft_cap=None, sinks=None, implementation=None, return_residual=False,
):
    """softmax(scale · query keyᵀ + bias) value, differentiable any number of times in either mode.

    The names, axis order and meaning are those of `jax.nn.dot_product_attention`; swapping the
    import is all that a user does. Orders zero, one and two (the value, its gradient, and the
    gradient of a function of that gradient) take memory linear in T and S where kernels run.

    Axes: B batch, T queries, S keys, N query heads, K key heads, H width, E width of value.
    Without a batch axis in query, B is one and no argument needs it.

    What hides keys may be given in any combination; a query sees a key where all of it agrees.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32, or float64 (float64 never
        runs kernels). T and S may be any length of at least one, H and E at most 256.
      key: `[B, S, K, H]` or `[S, K, H]`, of query's dtype. N must be a multiple of K: each key
        head serves a group of N / K query heads (grouped-query attention, arXiv 2305.13245).
      value: `[B, S, K, E]` or `[S, K, E]`, of query's dtype.
      bias: added to the scores, after scale and soft cap; broadcastable to `[B, N, T, S]`, any
        floating dtype. Its gradient has its own shape and dtype and is computed only if asked
        for. −∞ hides a key; so does finfo.min, but a row that has nothing else averages value.
      mask: boolean, broadcastable to `[B, N, T, S]`, True where a query sees a key. Read as it is,
        without expanding the axes of size one; tiles in which all or nothing is visible are not
        read at all.
      scale: factor on the scores, by default 1/√H. A traced or array scale is differentiable: it
        is multiplied into query.
      is_causal: query t sees keys 0 … t, also when T ≠ S.
      query_seq_lengths, key_value_seq_lengths: int32 `[B]`. Queries past their length give 0.
      local_window_size: (left, right), or one number for both: query t sees keys t − left …
        t + right.
      query_offset: for is_causal and local_window_size, query t stands at key position
        t + query_offset; an int, or an int32 scalar or `[B]` that may be traced. S − T aligns the
        last query with the last key (decoding, a chunk of a sequence on a key cache).
      key_start, key_end: int32, broadcastable to `[B, T]`: query t sees keys key_start ≤ s <
        key_end. A partly filled cache, packed documents, a prefix.
      query_segment_ids, key_value_segment_ids: int32 `[B, T]` and `[B, S]`, both or neither:
        queries see keys with their own id; negative ids are padding. Sorted ids let whole blocks
        be skipped.
      logits_soft_cap: a scaled product z becomes cap · tanh(z / cap).
      sinks: `[N]`, floating: the logit of one more key for each head, which has no value
        (arXiv 2309.17453).
      implementation: "triton" runs the kernels, "xla" plain JAX formulas that store T×S scores.
        None takes the kernels when the computation is lowered for an NVIDIA GPU of compute
        capability 8.0 or newer, and the plain formulas elsewhere. "triton" runs on a CPU, slowly,
        if TRITON_INTERPRET=1 is in the environment (float16 and float32).
      return_residual: also return the log-sum-exp of each row of scores.

    Float32 products are accurate to float32 (three TF32 products on the tensor cores). Inside
    `jax.default_matmul_precision("tensorfloat32")` they are single TF32 products, inside
    `jax.default_matmul_precision("highest")` they are made without tensor cores.

    Returns:
      The output `[B, T, N, E]` or `[T, N, E]` in query's dtype; with return_residual a pair of it
      and the log-sum-exp, `[B, T, N]` or `[T, N]`, float32 (float64 for float64) and
      differentiable (`jax.nn` cuts its gradient off). A query that sees no key gives output 0,
      log-sum-exp −∞ (its sink, if there are sinks) and no gradient; `jax.nn` averages value there.

    Differentiable: query, key, value, bias, sinks, scale, in forward and reverse mode to any order.
    Order three and up, and forward over forward, differentiate the plain formulas and store T×S.

    Raises:
      ValueError, TypeError: shapes, dtypes or names that do not fit; the message names the argument.
      NotImplementedError: a width over 256, or bfloat16 in Triton's interpreter.

    Method: FlashAttention-2 (arXiv 2307.08691) for orders zero and one; order two is derived in
    `jttt/DESIGN.md`.
    """
    query, key, value = _checked_inputs(query, key, value)
    _check_implementation(implementation, query.dtype)
    has_batch = query.ndim == 4
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    (B, T, N, H), S = query.shape, key.shape[1]

    if scale is None:
        scale = 1 / math.sqrt(H)
    elif not isinstance(scale, numbers.Real):
        query, scale = _scaled(query, scale), 1.0
    bias = _dense("bias", bias, (B, N, T, S))
    sinks = _checked_sinks(sinks, N)
    if query.dtype != jnp.float64:  # Scores are no wider then, and kernels have no float64.
        bias, sinks = (x.astype(jnp.float32) if x is not None and x.dtype == jnp.float64 else x
                       for x in (bias, sinks))
    mask = _dense("mask", mask, (B, N, T, S))
    query_seq_lengths = _integers("query_seq_lengths", query_seq_lengths, (B,), has_batch)
    key_value_seq_lengths = _integers("key_value_seq_lengths", key_value_seq_lengths, (B,), has_batch)
    key_start = _integers("key_start", key_start, (B, T), has_batch, broadcast=True)
    key_end = _integers("key_end", key_end, (B, T), has_batch, broadcast=True)
    query_segments, key_segments = _checked_segments(query_segment_ids, key_value_segment_ids, B, T, S, has_batch)

    band = Band(right=0) if is_causal else Band()
    if local_window_size is not None:
        band &= Band(*_checked_window(local_window_size))
    offset = None
    if isinstance(query_offset, numbers.Integral):
        band = band.shifted(int(query_offset), T + S)
    else:
        offset = _integers("query_offset", query_offset, (B,), has_batch, broadcast=True)
    limits = (key_start, key_end, query_seq_lengths, key_value_seq_lengths, offset)
    if any(limit is not None for limit in limits):
        key_start, key_end = masks.key_ranges(*limits[:4], band, offset, T, S)
    if offset is not None:
        band = Band()

    spec = AttentionSpec(
        scale=float(scale), band=band, soft_cap=_checked_soft_cap(logits_soft_cap),
        precision=default_precision(),
        implementation=implementation)
    # Before any rule of derivatives, so that what one device takes from all gets the gradients of all.
    inputs = passes.varying_alike(dict(
        query=query, key=key, value=value, bias=bias, sinks=sinks,
        key_start=key_start, key_end=key_end, query_segments=query_segments, key_segments=key_segments,
        mask=mask, mask_summary=None if mask is None else masks.summarise(mask)))
    made = derivatives.attention(spec, inputs)
    output, lse = made["output"], jnp.swapaxes(made["lse"], -1, -2)
    if not has_batch:
        output, lse = output[0], lse[0]
    return (output, lse) if return_residual else output


def _checked_inputs(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = dict(query=query, key=key, value=value)
    for name, x in arrays.items():
        x = arrays[name] = jnp.asarray(x)
        axes = "[B, T, N, H] or [T, N, H]" if name == "query" else "[B, S, K, H] or [S, K, H]"
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} has shape {list(x.shape)}: expected {axes}")
        if x.ndim != arrays["query"].ndim:
            raise ValueError(f"{name} has {x.ndim} axes and query {arrays['query'].ndim}: expected "
                             "both with a batch axis or both without")
        if x.dtype.name not in _DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype.name}: expected one of {', '.join(_DTYPES)}")
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


def _check_implementation(implementation: Any, dtype: jnp.dtype) -> None:
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation was {implementation!r}: expected 'triton', 'xla' or None")
    if implementation == "triton" and dtype == jnp.float64:
        raise TypeError("query has dtype float64 and implementation was 'triton': expected float16, "
                        "bfloat16 or float32; float64 runs with implementation='xla' or None")
    if implementation == "triton" and dtype == jnp.bfloat16 and passes.interprets_triton():
        raise NotImplementedError(
            "query has dtype bfloat16 and implementation was 'triton' under TRITON_INTERPRET=1: "
            "Triton's interpreter has no bfloat16 products; expected float16 or float32")


def _scaled(query: jax.Array, scale: ArrayLike) -> jax.Array:
    scale = jnp.asarray(scale)
    if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale has shape {list(scale.shape)} and dtype {scale.dtype.name}: expected a "
                         "number or a floating-point scalar")
    wide = jnp.promote_types(query.dtype, scale.dtype)
    return (query.astype(wide) * scale.astype(wide)).astype(query.dtype)


def _dense(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
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


def _integers(name: str, x: Any, shape: tuple[int, ...], has_batch: bool, broadcast: bool = False
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


def _checked_segments(query_ids: Any, key_ids: Any, B: int, T: int, S: int, has_batch: bool
                      ) -> tuple[jax.Array | None, jax.Array | None]:
    names = ("query_segment_ids", "key_value_segment_ids")
    for given, missing, name, other in ((query_ids, key_ids, *names), (key_ids, query_ids, *names[::-1])):
        if given is not None and missing is None:
            raise ValueError(f"{other} was None and {name} was given: expected both or neither")
    return (_integers(names[0], query_ids, (B, T), has_batch), _integers(names[1], key_ids, (B, S), has_batch))


def _checked_window(window: Any) -> tuple[int, int]:
    sides = (window, window) if isinstance(window, numbers.Integral) else window
    try:
        left, right = map(operator.index, sides)
    except (TypeError, ValueError):
        left = right = -1
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size was {window!r}: expected an int of at least 0, or a pair "
                         "(left, right) of them")
    return left, right


def _checked_soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    if not isinstance(cap, numbers.Real) or not 1e-30 <= cap <= 1e30:
        raise ValueError(f"logits_soft_cap was {cap!r}: expected a number from 1e-30 to 1e30, or None")
    return float(cap)


def _checked_sinks(sinks: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {sinks.dtype.name}: expected a floating dtype")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [N] = [{heads}]")
    return sinks[None]
