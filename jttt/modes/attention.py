"""The public function of the modes: checks, canonical form, and nothing else."""

from __future__ import annotations

import functools
import math
import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jttt
from jttt import passes
from jttt.modes import rules
from jttt.spec import AttentionSpec, Band, Implementation, default_precision

BWD_MODES = ("flash", *rules.MODES)


def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, scale: float | None = None, is_causal: bool = False,
    bwd_mode: str = "flash", implementation: Implementation | None = None,
) -> jax.Array:
    """softmax(scale · query keyᵀ) value, with a backward of one's choice.

    Every mode gives the same results and can be differentiated twice and more, in reverse mode; they
    differ in what they keep for the backward and in who carries it out:

      "flash"               `jttt.dot_product_attention`: nothing of size T×S, kernels at every order.
      "recompute"           its forward; the backward recomputes P in plain JAX. Keeps query, key, value.
      "save_p"              the forward stores P; the backward is plain JAX on it.
      "save_p_triton_bwd"   the same, with a kernel for the gradient of value.
      "save_p_triton_full"  the forward stores P; kernels for the backward and for order two, which skip
                            the blocks that a causal mask hides. Nothing else has size T×S.

    P is stored in query's dtype: B·N·T·S numbers. In all modes but "flash", key heads that serve several
    query heads are repeated.

    Axes: B batch, T queries, S keys, N query heads, K key heads, H width, E width of value.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32, or float64 (float64 never runs kernels).
      key: `[B, S, K, H]` or `[S, K, H]`, of query's dtype, where N is a multiple of K.
      value: `[B, S, K, E]` or `[S, K, E]`, of query's dtype.
      scale: factor on the scores, a number; by default 1/√H.
      is_causal: query t sees keys 0 … t, also when T ≠ S.
      bwd_mode: one of `BWD_MODES`.
      implementation: "triton" runs the kernels, "xla" plain JAX in their place; None takes the kernels where
        they can run, as `jttt.dot_product_attention` does.

    Returns:
      The output `[B, T, N, E]` or `[T, N, E]`, in query's dtype.

    Raises:
      ValueError: an unknown bwd_mode; and all that `jttt.dot_product_attention` raises.
      TypeError: a scale that is not a number.
    """
    if bwd_mode not in BWD_MODES:
        raise ValueError(f"bwd_mode was {bwd_mode!r}: expected one of {', '.join(map(repr, BWD_MODES))}")
    if scale is not None and not isinstance(scale, numbers.Real):
        raise TypeError(f"scale was {scale!r}: expected a number or None")
    flash = functools.partial(jttt.dot_product_attention, scale=scale, is_causal=is_causal,
                              implementation=implementation)
    if bwd_mode == "flash":
        return flash(query, key, value)
    query, key, value = map(jnp.asarray, (query, key, value))
    output = jax.eval_shape(flash, query, key, value)  # Its checks are the checks here.

    H, group = query.shape[-1], query.shape[-2] // key.shape[-2]
    spec = AttentionSpec(
        scale=1 / math.sqrt(H) if scale is None else float(scale), band=Band(right=0) if is_causal else Band(),
        precision=default_precision(), implementation=implementation)
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    inputs = passes.varying_alike(dict(query=query, key=key, value=value))
    made = rules.attention(spec, bwd_mode, *map(_heads_first, inputs.values()))
    return jnp.swapaxes(made.reshape(*output.shape[:-3], output.shape[-2], output.shape[-3], -1), -2, -3)


def _heads_first(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]` or `[T, N, H]` to `[B · N, T, H]`."""
    return jnp.swapaxes(x, -2, -3).reshape(-1, x.shape[-3], x.shape[-1])
