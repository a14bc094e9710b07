"""The passes of the modes in plain JAX: what the kernels of the same names compute, and the gradients
that the plain modes let JAX differentiate.

Shapes, with M heads of the whole batch:

    query, t_query, d_query, g_query         [M, T, H]
    key, t_key, d_key, g_key                 [M, S, H]
    value, t_value, d_value, g_value         [M, S, E]
    output, d_output, t_output               [M, T, E]
    p, d_p                                   [M, T, S]
    delta, mean, row_term                    [M, T], float32 or wider

The prefixes and formulas are those of `jttt/reference.py` and `jttt/DESIGN.md`, where `mean` is a and
`row_term` ω; here P is given, and D' is the row sum of P ∘ dP, which holds for the rounded P too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jttt.spec import AttentionSpec

Results = dict[str, jax.Array]

_PRECISION = {"ieee": jax.lax.Precision.HIGHEST, "tf32x3": jax.lax.Precision.HIGHEST,
              "tf32": jax.lax.Precision.DEFAULT}


def product(spec: AttentionSpec, dtype: Any, formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """einsum of operands in `dtype`, with sums in float32 (float64 for float64)."""
    return _product(formula, _PRECISION[spec.precision], left.astype(dtype), right.astype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(formula: str, precision: jax.lax.Precision, left: jax.Array, right: jax.Array) -> jax.Array:
    accumulator = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=accumulator)


def _product_fwd(formula, precision, left, right):
    return _product(formula, precision, left, right), (left, right)


def _product_bwd(formula, precision, residuals, cotangent):
    # Left to itself, JAX would multiply the float32 cotangent as it is, off the fast path of half precision.
    left, right = residuals
    inputs, result = formula.split("->")
    of_left, of_right = inputs.split(",")
    cotangent = cotangent.astype(left.dtype)
    return (_product(f"{result},{of_right}->{of_left}", precision, cotangent, right).astype(left.dtype),
            _product(f"{of_left},{result}->{of_right}", precision, left, cotangent).astype(left.dtype))


_product.defvjp(_product_fwd, _product_bwd)


class _Products:
    """The three products of a head that all passes are made of."""

    def __init__(self, spec: AttentionSpec, dtype: Any):
        self.over_width = functools.partial(product, spec, dtype, "mth,msh->mts")
        self.over_keys = functools.partial(product, spec, dtype, "mts,msh->mth")
        self.over_queries = functools.partial(product, spec, dtype, "mts,mth->msh")


def probabilities(spec: AttentionSpec, query: jax.Array, key: jax.Array) -> jax.Array:
    """softmax of the scores, in float32 or wider."""
    scores = spec.scale * _Products(spec, query.dtype).over_width(query, key)
    if spec.band.right is not None:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def gradients(spec: AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array, p: jax.Array,
              d_output: jax.Array, d_p: jax.Array | None = None, of_value: Callable | None = None
              ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_query, d_key, d_value) from P and the cotangents of the output and of P itself.

    `of_value(spec, p=, d_output=)` makes d_value in another way than `d_value` below.
    """
    multiply = _Products(spec, query.dtype)
    dp = multiply.over_width(d_output, value)
    if d_p is not None:
        dp += d_p.astype(dp.dtype)
    wide = p.astype(dp.dtype)
    ds = wide * (dp - jnp.sum(wide * dp, axis=-1, keepdims=True))
    of_query, of_key = multiply.over_keys(ds, key), multiply.over_queries(ds, query)
    return ((spec.scale * of_query).astype(query.dtype), (spec.scale * of_key).astype(query.dtype),
            (of_value or d_value)(spec, p=p, d_output=d_output)["d_value"])


def second_order(spec: AttentionSpec, query, key, value, d_output, t_query, t_key, t_value
                 ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(g_query, g_key, g_value, t_output) from their true inputs alone, for autodiff to differentiate."""
    def first(query, key, value, d_output):
        return gradients(spec, query, key, value, probabilities(spec, query, key), d_output)

    return jax.vjp(first, query, key, value, d_output)[1]((t_query, t_key, t_value))


# The passes.


def forward(spec: AttentionSpec, *, query, key, value) -> Results:
    p = probabilities(spec, query, key).astype(query.dtype)
    output = _Products(spec, query.dtype).over_keys(p, value).astype(query.dtype)
    return dict(output=output, p=p)


def d_value(spec: AttentionSpec, *, p, d_output) -> Results:
    return dict(d_value=_Products(spec, d_output.dtype).over_queries(p, d_output).astype(d_output.dtype))


def row_sum(spec: AttentionSpec, *, value, p, d_output) -> Results:
    dp = _Products(spec, p.dtype).over_width(d_output, value)
    return dict(delta=jnp.sum(p.astype(dp.dtype) * dp, axis=-1))


def d_query(spec: AttentionSpec, *, key, value, p, d_output, delta) -> Results:
    ds = _score_gradient(spec, value, p, d_output, delta)
    return dict(d_query=(spec.scale * _Products(spec, p.dtype).over_keys(ds, key)).astype(p.dtype))


def d_key(spec: AttentionSpec, *, query, value, p, d_output, delta) -> Results:
    ds = _score_gradient(spec, value, p, d_output, delta)
    return dict(d_key=(spec.scale * _Products(spec, p.dtype).over_queries(ds, query)).astype(p.dtype))


def tangent(spec: AttentionSpec, *, query, key, value, output, p, d_output, t_query, t_key, t_value) -> Results:
    multiply = _Products(spec, p.dtype)
    # The row sum is of the rounded numbers that meet value: they cancel against it in t_output.
    a = _score_tangent(spec, query, key, t_query, t_key)
    pa = (p * a).astype(p.dtype)
    mean = jnp.sum(pa.astype(a.dtype), axis=-1)
    t_output = multiply.over_keys(pa, value) + multiply.over_keys(p, t_value) - mean[..., None] * output.astype(a.dtype)
    row_term = jnp.sum(d_output.astype(a.dtype) * t_output, axis=-1)
    return dict(t_output=t_output.astype(p.dtype), mean=mean, row_term=row_term)


def g_query(spec: AttentionSpec, *, query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value
            ) -> Results:
    multiply = _Products(spec, p.dtype)
    _, ds, r = _second_score_gradients(
        spec, query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value)
    result = multiply.over_keys(r, key) + multiply.over_keys(ds, t_key)
    return dict(g_query=(spec.scale * result).astype(p.dtype))


def g_key_value(spec: AttentionSpec, *, query, key, value, p, d_output, delta, mean, row_term, t_query, t_key,
                t_value) -> Results:
    multiply = _Products(spec, p.dtype)
    e, ds, r = _second_score_gradients(
        spec, query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value)
    of_key = multiply.over_queries(r, query) + multiply.over_queries(ds, t_query)
    return dict(g_key=(spec.scale * of_key).astype(p.dtype),
                g_value=multiply.over_queries(e, d_output).astype(p.dtype))


def _score_gradient(spec, value, p, d_output, delta) -> jax.Array:
    """dS of the design note."""
    return p * (_Products(spec, p.dtype).over_width(d_output, value) - delta[..., None])


def _score_tangent(spec, query, key, t_query, t_key) -> jax.Array:
    """A of the design note."""
    multiply = _Products(spec, query.dtype)
    return spec.scale * (multiply.over_width(t_query, key) + multiply.over_width(query, t_key))


def _second_score_gradients(spec, query, key, value, p, d_output, delta, mean, row_term, t_query, t_key, t_value
                            ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """E, dS and R of the design note."""
    multiply = _Products(spec, p.dtype)
    a = _score_tangent(spec, query, key, t_query, t_key)
    dp, b = multiply.over_width(d_output, value), multiply.over_width(d_output, t_value)
    centred, ds = a - mean[..., None], p * (dp - delta[..., None])
    return p * centred, ds, ds * centred + p * (b - row_term[..., None])
