"""The public function: from its arguments to their canonical form, and nothing else."""

from __future__ import annotations

import math
import numbers
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jttt import arguments, derivatives, masks, passes
from jttt.spec import AttentionSpec, Band, Implementation, default_precision


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
        capability 8.0 or newer and has more than 2²⁰ scores (B · N · T · S, vmap's axes included),
        and the plain formulas elsewhere. "triton" runs on a CPU, slowly, if TRITON_INTERPRET=1 is
        in the environment (float16 and float32).
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
    query, key, value = arguments.checked_inputs(query, key, value)
    arguments.check_implementation(implementation, query.dtype)
    has_batch = query.ndim == 4
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    (B, T, N, H), S = query.shape, key.shape[1]

    if scale is None:
        scale = 1 / math.sqrt(H)
    elif not isinstance(scale, numbers.Real):
        query, scale = arguments.scaled(query, scale), 1.0
    bias = arguments.dense("bias", bias, (B, N, T, S))
    sinks = arguments.checked_sinks(sinks, N)
    if query.dtype != jnp.float64:  # Scores are no wider then, and kernels have no float64.
        bias, sinks = (x.astype(jnp.float32) if x is not None and x.dtype == jnp.float64 else x
                       for x in (bias, sinks))
    mask = arguments.dense("mask", mask, (B, N, T, S))
    query_seq_lengths = arguments.integers("query_seq_lengths", query_seq_lengths, (B,), has_batch)
    key_value_seq_lengths = arguments.integers("key_value_seq_lengths", key_value_seq_lengths, (B,), has_batch)
    key_start = arguments.integers("key_start", key_start, (B, T), has_batch, broadcast=True)
    key_end = arguments.integers("key_end", key_end, (B, T), has_batch, broadcast=True)
    query_segments, key_segments = arguments.checked_segments(
        query_segment_ids, key_value_segment_ids, B, T, S, has_batch)

    band = Band(right=0) if is_causal else Band()
    if local_window_size is not None:
        band &= Band(*arguments.checked_window(local_window_size))
    offset = None
    if isinstance(query_offset, numbers.Integral):
        band = band.shifted(int(query_offset), T + S)
    else:
        offset = arguments.integers("query_offset", query_offset, (B,), has_batch, broadcast=True)
    limits = (key_start, key_end, query_seq_lengths, key_value_seq_lengths, offset)
    if any(limit is not None for limit in limits):
        key_start, key_end = masks.key_ranges(*limits[:4], band, offset, T, S)
    if offset is not None:
        band = Band()

    spec = AttentionSpec(
        scale=float(scale), band=band, soft_cap=arguments.checked_soft_cap(logits_soft_cap),
        precision=default_precision(), implementation=implementation)
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
