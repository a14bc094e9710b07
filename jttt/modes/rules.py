"""The derivative rules of the modes, on arrays as in `plain.py`.

The plain modes leave order two to JAX, which differentiates the gradients that they are made of. Where P
is stored, it is an output of the forward beside the attention itself, so its own cotangent finds the way
back through softmax. "save_p_triton_full" is built like the main path: the backward and its derivative
are rules around kernels, and no cotangent of P is ever made.
"""

from __future__ import annotations

import functools

import jax

import jttt
from jttt.modes import passes, plain
from jttt.spec import AttentionSpec

MODES = ("recompute", "save_p", "save_p_triton_bwd", "save_p_triton_full")


def attention(spec: AttentionSpec, mode: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The output, `[M, T, E]`, with the derivatives of `mode`."""
    if mode == "recompute":
        return _recompute(spec, query, key, value)
    return _stored(spec, mode, query, key, value)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recompute(spec, query, key, value):
    output = jttt.dot_product_attention(
        query[:, :, None], key[:, :, None], value[:, :, None], scale=spec.scale,
        is_causal=spec.band.right is not None, implementation=spec.implementation)
    return output[:, :, 0]


def _recompute_fwd(spec, query, key, value):
    return _recompute(spec, query, key, value), (query, key, value)


def _recompute_bwd(spec, residuals, d_output):
    query, key, value = residuals
    return plain.gradients(spec, query, key, value, plain.probabilities(spec, query, key), d_output)


_recompute.defvjp(_recompute_fwd, _recompute_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stored(spec, mode, query, key, value):
    """(output, p)"""
    made = passes.run("forward", spec, query=query, key=key, value=value)
    return made["output"], made["p"]


def _stored_fwd(spec, mode, query, key, value):
    made = _stored(spec, mode, query, key, value)
    return made, (query, key, value, *made)


def _stored_bwd(spec, mode, residuals, cotangents):
    query, key, value, output, p = residuals
    d_output, d_p = cotangents
    if mode == "save_p_triton_full":
        # P leads to `_full_backward` alone, whose rule holds the whole dependence on query and key: d_p is 0.
        return _full_backward(spec, query, key, value, output, p, d_output)[:3]
    of_value = _d_value if mode == "save_p_triton_bwd" else plain.d_value
    return plain.gradients(spec, query, key, value, p, d_output, d_p, of_value)


_stored.defvjp(_stored_fwd, _stored_bwd)


def _d_value(spec: AttentionSpec, *, p: jax.Array, d_output: jax.Array) -> plain.Results:
    return dict(d_value=_d_value_by_kernel(spec, p, d_output))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _d_value_by_kernel(spec, p, d_output):
    return passes.run("d_value", spec, p=p, d_output=d_output)["d_value"]


def _d_value_fwd(spec, p, d_output):
    return _d_value_by_kernel(spec, p, d_output), (p, d_output)


def _d_value_bwd(spec, residuals, t_value):
    p, d_output = residuals
    return jax.vjp(lambda p, d_output: plain.d_value(spec, p=p, d_output=d_output)["d_value"], p, d_output)[1](t_value)


_d_value_by_kernel.defvjp(_d_value_fwd, _d_value_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _full_backward(spec, query, key, value, output, p, d_output):
    """(d_query, d_key, d_value, delta); the last is for the derivative alone."""
    delta = passes.run("row_sum", spec, value=value, p=p, d_output=d_output)["delta"]
    rows = dict(value=value, p=p, d_output=d_output, delta=delta)
    return (passes.run("d_query", spec, key=key, **rows)["d_query"],
            passes.run("d_key", spec, query=query, **rows)["d_key"],
            passes.run("d_value", spec, p=p, d_output=d_output)["d_value"], delta)


def _full_backward_fwd(spec, *arguments):
    made = _full_backward(spec, *arguments)
    return made, (*arguments, made[-1])


def _full_backward_bwd(spec, residuals, cotangents):
    g_query, g_key, g_value, t_output = _full_double_backward(spec, *residuals, *cotangents[:3])
    return g_query, g_key, g_value, None, None, t_output


_full_backward.defvjp(_full_backward_fwd, _full_backward_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _full_double_backward(spec, query, key, value, output, p, d_output, delta, t_query, t_key, t_value):
    """(g_query, g_key, g_value, t_output)"""
    operands = dict(query=query, key=key, value=value, p=p, d_output=d_output,
                    t_query=t_query, t_key=t_key, t_value=t_value)
    first = passes.run("tangent", spec, output=output, **operands)
    operands |= dict(delta=delta, mean=first["mean"], row_term=first["row_term"])
    of_keys = passes.run("g_key_value", spec, **operands)
    return (passes.run("g_query", spec, **operands)["g_query"], of_keys["g_key"], of_keys["g_value"],
            first["t_output"])


def _full_double_backward_fwd(spec, *arguments):
    return _full_double_backward(spec, *arguments), arguments


def _full_double_backward_bwd(spec, arguments, cotangents):
    query, key, value, output, p, d_output, delta, *direction = arguments
    _, pull_back = jax.vjp(functools.partial(plain.second_order, spec), query, key, value, d_output, *direction)
    of_query, of_key, of_value, of_d_output, *of_direction = pull_back(cotangents)
    return of_query, of_key, of_value, None, None, of_d_output, None, *of_direction


_full_double_backward.defvjp(_full_double_backward_fwd, _full_double_backward_bwd)
