"""Attention, its gradient and its second-order passes in plain `jax.numpy`.

This is the executable specification: kernels compute what the function of the same name here
computes, and these functions are the implementation wherever no kernel runs. They store scores of
size T×S.

Shapes, with any number of batch axes in front (`...`, the last of them B), N query heads, K key
heads, G = N / K:

    query, t_query, d_query, g_query                                [..., T, N, H]
    key, t_key, d_key, g_key                                        [..., S, K, H]
    value, t_value, d_value, g_value                                [..., S, K, E]
    output, d_output, t_output                                      [..., T, N, E]
    lse, lse_tail, delta, t_lse, row_term   (float32 or wider)      [..., N, T]
    bias, t_bias, d_bias, g_bias                                    [..., N or 1, T or 1, S or 1]
    sinks, t_sinks, d_sinks, g_sinks                                [..., N]
    what hides keys                                                 `masks.OPERANDS`

Prefixes: `d_` is the gradient (order one), `t_` the tangent along a direction, `g_` the gradient
at order two. The direction of order two, (t_query, t_key, t_value, t_bias, t_sinks), is the
cotangent that reaches (d_query, …); None stands for a part of it that is zero.

Products take operands in the input's dtype and accumulate in float32 (float64 for float64);
scores, softmax and row sums stay in the accumulator's dtype. A query that sees no key and has no
sink has output 0 and log-sum-exp −inf, and every derivative through it is 0.

Method: Rabe & Staats (arXiv 2112.05682) and FlashAttention-2 (arXiv 2307.08691) for orders zero
and one; `DESIGN.md` derives order two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jttt import masks
from jttt.spec import AttentionSpec

Results = dict[str, jax.Array]

_PRECISION = {"ieee": jax.lax.Precision.HIGHEST, "tf32x3": jax.lax.Precision.HIGHEST,
              "tf32": jax.lax.Precision.DEFAULT}


class _Attention:
    """One call's scores and probabilities, and the three kinds of product the passes are made of."""

    def __init__(self, spec: AttentionSpec, query: jax.Array, key: jax.Array, bias: jax.Array | None,
                 hidden: masks.Arrays):
        if spec.ring is not None:
            raise NotImplementedError(
                "ring_attention was differentiated beyond what its passes over devices compute: expected a gradient, "
                "a gradient of a gradient, jax.jvp, or jax.jvp of a gradient")
        self.scale = spec.scale
        self.soft_cap = spec.soft_cap
        self.dtype = query.dtype
        self.partial = spec.partial
        self.accumulator = jnp.promote_types(query.dtype, jnp.float32)
        self.precision = _PRECISION[spec.precision]
        self.kv_heads = key.shape[-2]
        scores = self.scale * self.over_width(query, key)
        if self.soft_cap is not None:
            self.capped = jnp.tanh(scores / self.soft_cap)
            scores = self.soft_cap * self.capped
        if bias is not None:
            scores = scores + bias.astype(self.accumulator)
        seen = masks.visible(spec.band, hidden, query.shape[-3], key.shape[-3])
        self.scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)

    def stored(self, x: jax.Array) -> jax.Array:
        """A result `[..., length, heads, width]` as it is returned."""
        return x if self.partial else x.astype(self.dtype)

    def as_bias(self, tile: jax.Array, bias: jax.Array) -> jax.Array:
        """A gradient of scores `[..., N, T, S]`, summed over the axes along which bias was broadcast."""
        axes = tuple(axis for axis in range(-4, 0) if bias.ndim >= -axis and bias.shape[axis] == 1)
        tile = jnp.sum(tile, axis=axes, keepdims=True)
        return tile if self.partial else tile.astype(bias.dtype)

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

    def probabilities(self, lse: jax.Array, tail: jax.Array | None) -> jax.Array:
        """softmax of the scores, `[..., N, T, S]`, from their log-sum-exp and what rounding took off it."""
        exponents = self.scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]
        return jnp.exp(exponents if tail is None else exponents - tail[..., None])

    def through_cap(self, tile: jax.Array) -> jax.Array:
        """A gradient of capped scores as one of scaled products, or a tangent the other way."""
        return tile if self.soft_cap is None else tile * (1 - self.capped**2)

    def product_tangent(self, query, key, t_query, t_key) -> jax.Array | None:
        """The tangent of the scaled products along (t_query, t_key); None if both are absent."""
        parts = []
        if t_query is not None:
            parts.append(self.over_width(t_query, key))
        if t_key is not None:
            parts.append(self.over_width(query, t_key))
        return self.scale * sum(parts) if parts else None

    def score_tangent(self, product_tangent, t_bias) -> jax.Array | None:
        """A of the design note, the tangent of the scores; None if nothing moves them."""
        parts = []
        if product_tangent is not None:
            parts.append(self.through_cap(product_tangent))
        if t_bias is not None:
            parts.append(t_bias.astype(self.accumulator))
        return sum(parts) if parts else None


def _rows(column: jax.Array) -> jax.Array:
    """A per-row quantity `[..., N, T]` laid along `[..., T, N, 1]`."""
    return jnp.swapaxes(column, -1, -2)[..., None]


def forward(spec: AttentionSpec, *, query, key, value, bias=None, sinks=None, **hidden) -> Results:
    """Order zero: output, lse, and lse_tail if there is a bias.

    A bias may be so large that lse cannot hold the sum it is the logarithm of: where a whole row has
    −1e9, lse is that and no more. lse_tail is what rounding took off, and has no derivative: lse and it
    together have that of lse.
    """
    att = _Attention(spec, query, key, bias, hidden)
    peak = jnp.max(att.scores, axis=-1)
    if sinks is not None:
        sinks = sinks.astype(att.accumulator)[..., None]
        peak = jnp.maximum(peak, sinks)
    peak = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    weights = jnp.exp(att.scores - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks - peak)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    output = att.over_keys(weights / total[..., None], value)
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    results = dict(output=att.stored(output), lse=lse)
    if bias is not None:
        results["lse_tail"] = jnp.where(empty, 0, (peak - jnp.where(empty, 0, lse)) + jnp.log(total))
    return results


def delta(output: jax.Array, d_output: jax.Array, d_lse: jax.Array | None) -> jax.Array:
    """D' = rowsum(dO ∘ O) − dlse, `[..., N, T]`: what the softmax takes off every dP of a row."""
    column = jnp.swapaxes(jnp.sum(_widened(d_output) * _widened(output), axis=-1), -1, -2)
    return column if d_lse is None else column - d_lse


def _widened(x: jax.Array) -> jax.Array:
    """x in the accumulator's dtype, of the very values it has in its own: XLA may otherwise skip the
    rounding that made it, and D' would not fit the dP that kernels make of the rounded numbers."""
    kind = jnp.finfo(x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)


def sink_probabilities(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """What each row gives to its head's sink, `[..., N, T]`."""
    sinks = sinks.astype(lse.dtype)[..., None]
    return jnp.exp(sinks - jnp.where(lse == -jnp.inf, 0, lse))


def backward(spec: AttentionSpec, *, query, key, value, lse, d_output, delta, lse_tail=None, bias=None, **hidden
             ) -> Results:
    """Order one: d_query, d_key, d_value, and d_bias if there is a bias."""
    att = _Attention(spec, query, key, bias, hidden)
    p = att.probabilities(lse, lse_tail)
    ds = p * (att.over_width(d_output, value) - delta[..., None])
    dz = att.scale * att.through_cap(ds)
    results = dict(d_query=att.stored(att.over_keys(dz, key)),
                   d_key=att.stored(att.over_queries(dz, query)),
                   d_value=att.stored(att.over_queries(p, d_output)))
    return results if bias is None else results | dict(d_bias=att.as_bias(ds, bias))


def tangent(spec: AttentionSpec, *, query, key, value, output, lse, d_output=None, lse_tail=None, bias=None,
            sinks=None, t_query=None, t_key=None, t_value=None, t_bias=None, t_sinks=None, **hidden) -> Results:
    """Forward mode, and first pass of order two: t_output, t_lse, and row_term if there is a d_output.

    t_output and t_lse are the tangents of output and log-sum-exp along the direction, hence the
    gradients at order two of d_output and of the log-sum-exp's cotangent. row_term is ω of the
    second pass.
    """
    att = _Attention(spec, query, key, bias, hidden)
    p = att.probabilities(lse, lse_tail)
    a = att.score_tangent(att.product_tangent(query, key, t_query, t_key), t_bias)
    t_lse = jnp.zeros_like(lse)
    t_output = jnp.zeros_like(output, att.accumulator)
    if t_sinks is not None:
        t_lse += sink_probabilities(sinks, lse) * t_sinks.astype(att.accumulator)[..., None]
    if a is not None:
        # The row sum is of the rounded numbers that meet value: they cancel against it in t_output.
        pa = _widened((p * a).astype(query.dtype))
        t_lse += jnp.sum(pa, axis=-1)
        t_output += att.over_keys(pa, value)
    if t_value is not None:
        t_output += att.over_keys(p, t_value)
    t_output -= _rows(t_lse) * output
    results = dict(t_output=att.stored(t_output), t_lse=t_lse)
    if d_output is not None:
        results["row_term"] = jnp.swapaxes(jnp.sum(d_output * t_output, axis=-1), -1, -2)
    return results


def double_backward(spec: AttentionSpec, *, query, key, value, lse, d_output, delta, row_term, t_lse=None,
                    lse_tail=None, bias=None, t_query=None, t_key=None, t_value=None, t_bias=None, **hidden) -> Results:
    """Second pass of order two: g_query, g_key, g_value, and g_bias if there is a bias.

    t_lse is None where the direction moves no score: it then lies in value alone.
    """
    att = _Attention(spec, query, key, bias, hidden)
    p = att.probabilities(lse, lse_tail)
    dp = att.over_width(d_output, value) - delta[..., None]
    moved = att.product_tangent(query, key, t_query, t_key)
    a = att.score_tangent(moved, t_bias)
    a = jnp.zeros_like(p) if a is None else a
    centred = a if t_lse is None else a - t_lse[..., None]
    ds = p * dp
    r = dp * centred - row_term[..., None]
    if t_value is not None:
        r += att.over_width(d_output, t_value)
    r = p * r
    dz, rz = att.scale * att.through_cap(ds), att.scale * att.through_cap(r)
    if att.soft_cap is not None and moved is not None:
        rz += att.scale * att.through_cap(-2 / att.soft_cap * att.capped) * moved * ds
    g_query, g_key = att.over_keys(rz, key), att.over_queries(rz, query)
    if t_key is not None:
        g_query += att.over_keys(dz, t_key)
    if t_query is not None:
        g_key += att.over_queries(dz, t_query)
    results = dict(g_query=att.stored(g_query), g_key=att.stored(g_key),
                   g_value=att.stored(att.over_queries(p * centred, d_output)))
    return results if bias is None else results | dict(g_bias=att.as_bias(r, bias))


def sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """d_sinks, summed over T and B."""
    return _as_sinks(-sink_probabilities(sinks, lse) * delta, sinks)


def sink_second_order(sinks: jax.Array, lse: jax.Array, delta: jax.Array, t_lse: jax.Array, row_term: jax.Array,
                      t_sinks: jax.Array | None) -> jax.Array:
    """g_sinks: R of the design note for a column with no value, summed over T and B."""
    centred = -t_lse if t_sinks is None else t_sinks.astype(lse.dtype)[..., None] - t_lse
    r = -delta * centred - row_term
    return _as_sinks(sink_probabilities(sinks, lse) * r, sinks)


def _as_sinks(column: jax.Array, sinks: jax.Array) -> jax.Array:
    return jnp.sum(column, axis=(-3, -1), keepdims=True)[..., 0].astype(sinks.dtype)


def second_order(spec: AttentionSpec, *, query, key, value, d_output, d_lse=None, bias=None, sinks=None,
                 t_query=None, t_key=None, t_value=None, t_bias=None, t_sinks=None, **hidden) -> Results:
    """Order two from its true inputs alone: g_query, …, t_output, t_lse.

    The passes above take output, lse and the row columns as given; this is the whole function of
    the inputs, the cotangents and the direction, for autodiff to differentiate at order three and up.
    """
    inputs = dict(query=query, key=key, value=value, bias=bias)
    direction = dict(t_query=t_query, t_key=t_key, t_value=t_value, t_bias=t_bias)
    made = forward(spec, **inputs, sinks=sinks, **hidden)
    rows = dict(lse=made["lse"], lse_tail=made.get("lse_tail"), d_output=d_output)
    column = delta(made["output"], d_output, d_lse)
    first = tangent(spec, **inputs, **rows, **direction, output=made["output"], sinks=sinks, t_sinks=t_sinks, **hidden)
    columns = dict(delta=column, t_lse=first["t_lse"], row_term=first["row_term"])
    results = first | double_backward(spec, **inputs, **rows, **columns, **direction, **hidden)
    if sinks is not None:
        results["g_sinks"] = sink_second_order(sinks, rows["lse"], **columns, t_sinks=t_sinks)
    return results
