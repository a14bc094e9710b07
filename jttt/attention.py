"""The public function: checks, canonical form, and nothing else."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jttt import derivatives, passes
from jttt.spec import AttentionSpec, Band, Implementation, Precision

MAX_WIDTH = 256

_DTYPES = ("float16", "bfloat16", "float32", "float64")

# What `jax.default_matmul_precision` asks for; anything else keeps float32 products accurate.
_PRECISIONS: dict[str | None, Precision] = {
    "tensorfloat32": "tf32", "fastest": "tf32", "bfloat16": "tf32", "float32": "ieee",
    "highest": "ieee",
}


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *, scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | None = None, *, scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
    implementation=None, return_residual=False,
):
    """softmax(scale · query keyᵀ) value, differentiable any number of times in reverse mode.

    The names, axis order and meaning are those of `jax.nn.dot_product_attention`; swapping the
    import is all that a user does. Orders zero, one and two (the value, its gradient, and the
    gradient of a function of that gradient) take memory linear in T and S where kernels run.

    Axes: B batch, T queries, S keys, N query heads, K key heads, H width, E width of value.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32, or float64 (float64 never
        runs kernels). T and S may be any length of at least one, H and E at most 256.
      key: `[B, S, K, H]` or `[S, K, H]`, of query's dtype. N must be a multiple of K: each key
        head serves a group of N / K query heads (grouped-query attention, arXiv 2305.13245).
      value: `[B, S, K, E]` or `[S, K, E]`, of query's dtype.
      bias, mask, query_seq_lengths, key_value_seq_lengths, local_window_size: not there yet.
      scale: factor on the scores, by default 1/√H. A traced or array scale is differentiable: it
        is multiplied into query.
      is_causal: query t sees keys 0 … t, also when T ≠ S.
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
      and the log-sum-exp, `[B, T, N]` or `[T, N]`, float32 (float64 for float64) and, unlike
      jax.nn's, differentiable.

    Differentiable: query, key, value, scale, in reverse mode to any order. Order three and up
    differentiate the plain formulas and store T×S.

    Raises:
      ValueError, TypeError: shapes, dtypes or names that do not fit; the message names the argument.
      NotImplementedError: an argument or a width that is not there yet.

    Method: FlashAttention-2 (arXiv 2307.08691) for orders zero and one; order two is derived in
    `jttt/DESIGN.md`.
    """
    unsupported = dict(bias=bias, mask=mask, query_seq_lengths=query_seq_lengths,
                       key_value_seq_lengths=key_value_seq_lengths,
                       local_window_size=local_window_size)
    for name, argument in unsupported.items():
        if argument is not None:
            raise NotImplementedError(f"{name} was given, but jttt does not support it yet: expected None")

    query, key, value = _checked_inputs(query, key, value)
    _check_implementation(implementation, query.dtype)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif not isinstance(scale, numbers.Real):
        query, scale = _scaled(query, scale), 1.0
    spec = AttentionSpec(
        scale=float(scale), band=Band(right=0) if is_causal else Band(),
        precision=_PRECISIONS.get(jax.config.jax_default_matmul_precision, "tf32x3"),
        implementation=implementation)
    output, lse = derivatives.attention(spec, dict(query=query, key=key, value=value))
    return (output, jnp.swapaxes(lse, -1, -2)) if return_residual else output


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
