"""Attention of one chunk of a sequence to itself and to a cache of the keys before it.

A model that reads a long sequence in chunks keeps, per layer, the last `window` keys and values. A
query of the new chunk sees cached keys and keys of its own chunk. The two are separate calls of
`dot_product_attention`, whose outputs are merged by their log-sum-exps, so cache and chunk are
never concatenated, and a gradient that does not ask for the cache pays nothing for it:

    cache   query t sees slots s with  max(window - length, t + 1) ≤ s < window      a range of keys
    chunk   query t sees keys  s with  t - window < s ≤ t                            a causal window
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jttt.attention import dot_product_attention
from jttt.spec import Implementation


class KeyValueCache(NamedTuple):
    """The last `window` keys and values of a sequence, oldest first, right-aligned: a pytree.

    Attributes:
      key: `[B, window, K, H]` or `[window, K, H]`.
      value: `[B, window, K, E]` or `[window, K, E]`.
      length: int32 scalar, or `[B]`: how many slots, counted from the end, are filled.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array

    @property
    def window(self) -> int:
        return self.key.shape[-3]

    def append(self, key: jax.Array, value: jax.Array) -> KeyValueCache:
        """The cache after a chunk `[..., T, K, H]`, `[..., T, K, E]`; what no longer fits falls off the front."""

        def shifted(old: jax.Array, new: jax.Array) -> jax.Array:
            kept = max(0, self.window - new.shape[-3])
            tail = new[..., new.shape[-3] - (self.window - kept):, :, :]
            return jnp.concatenate([old[..., self.window - kept:, :, :], tail], axis=-3)

        length = jnp.minimum(self.length + key.shape[-3], self.window).astype(jnp.int32)
        return KeyValueCache(shifted(self.key, key), shifted(self.value, value), length)


def empty_cache(window: int, key_heads: int, width: int, dtype: DTypeLike, *, value_width: int | None = None,
                batch: int | None = None) -> KeyValueCache:
    """A cache that holds nothing yet.

    Args:
      window: keys it can hold, at least 1. A query sees itself and the window - 1 keys before it.
      key_heads: K, heads of key and value.
      width: H, width of a key.
      dtype: of keys and values, that of the queries to come.
      value_width: E, by default H.
      batch: B; None leaves the batch axis out.
    """
    if window < 1:
        raise ValueError(f"window was {window}: expected at least 1")
    axes = (window, key_heads) if batch is None else (batch, window, key_heads)
    return KeyValueCache(jnp.zeros((*axes, width), dtype), jnp.zeros((*axes, value_width or width), dtype),
                         jnp.zeros((), jnp.int32))


def chunk_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cache: KeyValueCache, *,
    scale: ArrayLike | None = None, query_offset: ArrayLike = 0, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, KeyValueCache]:
    """Causal attention of a chunk to itself and to the cache before it, within a window.

    Chunk by chunk this equals attention over the whole sequence,

        dot_product_attention(..., is_causal=True, local_window_size=(window - 1, 0))

    to every order of differentiation, `window` being what the cache can hold. Chunks may be of any
    length, longer than the window too. Memory is linear in T and window where kernels run.

    Axes as in `dot_product_attention`; T is the length of the chunk.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`.
      key, value: `[B, T, K, H]`, `[B, T, K, E]`, the chunk's own, or without B.
      cache: what came before (`empty_cache`, or the one returned for the chunk before). Its length
        may be traced; tiles that are not filled, or out of every query's window, are not read.
      scale, logits_soft_cap, implementation: as in `dot_product_attention`.
      query_offset: query t is the chunk's position t + query_offset; an int or an int32 scalar
        that may be traced. To decode, key and value are a buffer for one chunk, filled up to the
        query's own position; causality hides the rest, and the returned cache is not of use.

    Returns:
      The output `[B, T, N, E]` or `[T, N, E]` in query's dtype, and the cache for the next chunk.

    Differentiable: query, key, value, the cache's key and value, scale. Where the cache is not
    differentiated, as in the inner gradient of test-time training, its gradients are not computed,
    at order one, and their products are left out at order two.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit; the message names the argument.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    _check_cache(key, value, cache)
    T, window = query.shape[-3], cache.window
    # Where the window covers the chunk, causality is all that hides; a static offset only moves query t further on.
    covers = key.shape[-3] <= window
    common = dict(scale=scale, logits_soft_cap=logits_soft_cap, implementation=implementation, return_residual=True)
    own = dot_product_attention(
        query, key, value, is_causal=True, local_window_size=None if covers else (window - 1, 0),
        query_offset=query_offset, **common)
    position = jnp.arange(T, dtype=jnp.int32) + query_offset
    earlier = dot_product_attention(
        query, cache.key, cache.value,
        key_start=jnp.maximum(window - jnp.asarray(cache.length)[..., None], position + 1).astype(jnp.int32), **common)
    output, _ = merge(earlier, own)
    return output, cache.append(key, value)


def merge(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention to a union of disjoint sets of keys, from attention to each of them.

    Args:
      parts: pairs of an output `[..., T, N, E]` and its log-sum-exp `[..., T, N]`, as
        `dot_product_attention(..., return_residual=True)` returns them. A row that sees nothing
        has log-sum-exp −∞ and takes no part; a row that sees nothing anywhere gives 0 and −∞.

    Returns:
      The output in the parts' dtype and its log-sum-exp. Differentiable to any order in all of
      them; no derivative is ever NaN.
    """
    outputs, lses = zip(*parts, strict=True)
    peak = jnp.max(jnp.stack(lses), axis=0)
    # Any shift gives the same result, so it needs no gradient.
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    weights = [jnp.exp(lse - peak) for lse in lses]
    total = sum(weights)
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1)
    merged = sum((weight / total)[..., None] * output for weight, output in zip(weights, outputs, strict=True))
    lse = jnp.where(sees_any, peak + jnp.log(total), -jnp.inf)
    return merged.astype(outputs[0].dtype), lse


def _check_cache(key: jax.Array, value: jax.Array, cache: KeyValueCache) -> None:
    for name, new in (("key", key), ("value", value)):
        held = getattr(cache, name)
        if new.ndim not in (3, 4) or held.ndim != new.ndim or (
                held.shape[:-3] + held.shape[-2:] != new.shape[:-3] + new.shape[-2:]):
            raise ValueError(f"cache.{name} has shape {list(held.shape)} and {name} {list(new.shape)}: expected the "
                             "same but for the length, [B, window, K, H] and [B, T, K, H] or both without B")
        if held.dtype != new.dtype:
            raise TypeError(f"cache.{name} has dtype {held.dtype.name} and {name} {new.dtype.name}: expected the same")
    if cache.key.shape[:-1] != cache.value.shape[:-1]:
        raise ValueError(f"cache.value has shape {list(cache.value.shape)} and cache.key {list(cache.key.shape)}: "
                         "expected the same but for the width")
    length = jnp.asarray(cache.length)
    if length.dtype != jnp.int32 or length.shape not in ((), cache.key.shape[:-3]):
        raise ValueError(f"cache.length has shape {list(length.shape)} and dtype {length.dtype.name}: "
                         "expected an int32 scalar, or [B]")
