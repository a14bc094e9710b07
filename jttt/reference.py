"""Attention, its gradient and its second-order passes in plain `jax.numpy`.

This is the executable specification: each kernel computes what the function of the same name here
computes, and these functions are the implementation wherever no kernel runs. They store scores of
size T×S.

Shapes, with any number of batch axes in front (`...`), N query heads, K key heads, G = N / K:

    query, t_query, d_query, g_query                                [..., T, N, H]
    key, t_key, d_key, g_key                                        [..., S, K, H]
    value, t_value, d_value, g_value                                [..., S, K, E]
    output, d_output, t_output                                      [..., T, N, E]
    lse, delta, t_lse, row_term             (float32 or wider)      [..., N, T]

Prefixes: `d_` is the gradient (order one), `t_` the tangent along a direction, `g_` the gradient
at order two. The direction (t_query, t_key, t_value) of order two is the cotangent that reaches
(d_query, d_key, d_value); None stands for a direction that is zero.

Products take operands in the input's dtype and accumulate in float32 (float64 for float64);
scores, softmax and row sums stay in the accumulator's dtype. A query that sees no key has output
0 and log-sum-exp −inf, and every derivative through it is 0.

Method: Rabe & Staats (arXiv 2112.05682) and FlashAttention-2 (arXiv 2307.08691) for orders zero
and one; `DESIGN.md` derives order two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jttt import masks
from jttt.spec import AttentionSpec

_PRECISION = {"ieee": jax.lax.Precision.HIGHEST, "tf32x3": jax.lax.Precision.HIGHEST,
              "tf32": jax.lax.Precision.DEFAULT}


class _Attention:
    """One call's scores and probabilities, and the three kinds of product the passes are made of."""

    def __init__(self, spec: AttentionSpec, query: jax.Array, key: jax.Array):
        self.scale = spec.scale
        self.dtype = query.dtype
        self.accumulator = jnp.promote_types(query.dtype, jnp.float32)
        self.precision = _PRECISION[spec.precision]
        self.kv_heads = key.shape[-2]
        self.visible = masks.visible(spec.band, query.shape[-3], key.shape[-3])
        self.scores = self.scale * self.over_width(query, key)
        if self.visible is not None:
            self.scores = jnp.where(self.visible, self.scores, -jnp.inf)

    def _product(self, formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(formula, left.astype(self.dtype), right.astype(self.dtype),
                          precision=self.precision, preferred_element_type=self.accumulator)

    def _grouped(self, x: jax.Array) -> jax.Array:
        """`[..., T, N, H]` to `[..., T, K, G, H]`: the query heads of each key head."""
        return x.reshape(*x.shape[:-2], self.kv_heads, -1, x.shape[-1])

    def over_width(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """rows · columnsᵀ: `[..., T, N, H]` and `[..., S, K, H]` to `[..., N, T, S]`."""
        tile = self._product("...tkgh,...skh->...kgts", self._grouped(rows), columns)
        return tile.reshape(*tile.shape[:-4], -1, *tile.shape[-2:])

    def over_keys(self, tile: jax.Array, columns: jax.Array) -> jax.Array:
        """tile · columns: `[..., N, T, S]` and `[..., S, K, H]` to `[..., T, N, H]`."""
        tile = tile.reshape(*tile.shape[:-3], self.kv_heads, -1, *tile.shape[-2:])
        rows = self._product("...kgts,...skh->...tkgh", tile, columns)
        return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])

    def over_queries(self, tile: jax.Array, rows: jax.Array) -> jax.Array:
        """tileᵀ · rows, summed over a group: `[..., N, T, S]`, `[..., T, N, H]` to `[..., S, K, H]`."""
        tile = tile.reshape(*tile.shape[:-3], self.kv_heads, -1, *tile.shape[-2:])
        return self._product("...kgts,...tkgh->...skh", tile, self._grouped(rows))

    def probabilities(self, lse: jax.Array) -> jax.Array:
        """softmax of the scores, `[..., N, T, S]`, from their log-sum-exp."""
        return jnp.exp(self.scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])

    def score_tangent(self, query, key, t_query, t_key) -> jax.Array | None:
        """A, the tangent of the scores along (t_query, t_key); None if both are absent."""
        parts = []
        if t_query is not None:
            parts.append(self.over_width(t_query, key))
        if t_key is not None:
            parts.append(self.over_width(query, t_key))
        return self.scale * sum(parts) if parts else None


def _rows(column: jax.Array) -> jax.Array:
    """A per-row quantity `[..., N, T]` laid along `[..., T, N, 1]`."""
    return jnp.swapaxes(column, -1, -2)[..., None]


def forward(spec: AttentionSpec, *, query, key, value) -> tuple[jax.Array, jax.Array]:
    """Order zero: `(output, lse)`."""
    att = _Attention(spec, query, key)
    peak = jax.lax.stop_gradient(jnp.max(att.scores, axis=-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(att.scores - peak)
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    output = att.over_keys(weights / total[..., None], value)
    lse = jnp.where(empty, -jnp.inf, peak[..., 0] + jnp.log(total))
    return output.astype(value.dtype), lse


def delta(output: jax.Array, d_output: jax.Array, d_lse: jax.Array | None) -> jax.Array:
    """D' = rowsum(dO ∘ O) − dlse, `[..., N, T]`: what the softmax takes off every dP of a row."""
    accumulator = jnp.promote_types(output.dtype, jnp.float32)
    column = jnp.sum(d_output.astype(accumulator) * output.astype(accumulator), axis=-1)
    column = jnp.swapaxes(column, -1, -2)
    return column if d_lse is None else column - d_lse


def backward(spec: AttentionSpec, *, query, key, value, lse, d_output, delta
             ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order one: `(d_query, d_key, d_value)`."""
    att = _Attention(spec, query, key)
    p = att.probabilities(lse)
    ds = p * (att.over_width(d_output, value) - delta[..., None])
    return ((att.scale * att.over_keys(ds, key)).astype(query.dtype),
            (att.scale * att.over_queries(ds, query)).astype(key.dtype),
            att.over_queries(p, d_output).astype(value.dtype))


def tangent(spec: AttentionSpec, *, query, key, value, output, lse, d_output, delta,
            t_query=None, t_key=None, t_value=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First pass of order two: `(t_output, t_lse, row_term)`.

    t_output and t_lse are the tangents of output and log-sum-exp along the direction, hence the
    gradients at order two of d_output and of the log-sum-exp's cotangent. row_term is w of the
    second pass.
    """
    att = _Attention(spec, query, key)
    p = att.probabilities(lse)
    a = att.score_tangent(query, key, t_query, t_key)
    t_output, t_lse = jnp.zeros_like(output, att.accumulator), jnp.zeros_like(lse)
    if a is not None:
        t_lse = jnp.sum(p * a, axis=-1)
        t_output = att.over_keys(p * a, value) - _rows(t_lse) * output
    if t_value is not None:
        t_output += att.over_keys(p, t_value)
    row_term = jnp.swapaxes(jnp.sum(d_output * t_output, axis=-1), -1, -2) - t_lse * delta
    return t_output.astype(output.dtype), t_lse, row_term


def double_backward(spec: AttentionSpec, *, query, key, value, lse, d_output, delta, t_lse, row_term,
                    t_query=None, t_key=None, t_value=None
                    ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Second pass of order two: `(g_query, g_key, g_value)`."""
    att = _Attention(spec, query, key)
    p = att.probabilities(lse)
    dp = att.over_width(d_output, value)
    a = att.score_tangent(query, key, t_query, t_key)
    a = jnp.zeros_like(p) if a is None else a
    centred = a - t_lse[..., None]
    ds = p * (dp - delta[..., None])
    r = dp * centred - delta[..., None] * a - row_term[..., None]
    if t_value is not None:
        r += att.over_width(d_output, t_value)
    r = p * r
    g_query, g_key = att.over_keys(r, key), att.over_queries(r, query)
    if t_key is not None:
        g_query += att.over_keys(ds, t_key)
    if t_query is not None:
        g_key += att.over_queries(ds, t_query)
    g_value = att.over_queries(p * centred, d_output)
    return ((att.scale * g_query).astype(query.dtype), (att.scale * g_key).astype(key.dtype),
            g_value.astype(value.dtype))


def second_order(spec: AttentionSpec, *, query, key, value, d_output, d_lse=None,
                 t_query=None, t_key=None, t_value=None) -> tuple[jax.Array, ...]:
    """Order two from its true inputs alone: `(g_query, g_key, g_value, t_output, t_lse)`.

    The passes above take output, lse and the row columns as given; this is the whole function of
    (query, key, value, d_output, d_lse, direction), for autodiff to differentiate at order three
    and up.
    """
    inputs = dict(query=query, key=key, value=value)
    direction = dict(t_query=t_query, t_key=t_key, t_value=t_value)
    output, lse = forward(spec, **inputs)
    rows = dict(lse=lse, d_output=d_output, delta=delta(output, d_output, d_lse))
    t_output, t_lse, row_term = tangent(spec, **inputs, output=output, **rows, **direction)
    gradients = double_backward(spec, **inputs, **rows, t_lse=t_lse, row_term=row_term, **direction)
    return *gradients, t_output, t_lse
