"""The chain of derivative rules: attention, its backward, and the backward of that.

    attention         forward              saves query, key, value, output, lse
      └ backward      backward             saves its inputs
          └ double_backward                tangent, then double_backward
              └ autodiff of `reference.second_order`, exact at order three and up

Each rule is a `jax.custom_vjp` around passes of `passes.py`, so reverse mode over reverse mode runs
kernels end to end. Derivatives that nobody asked for and cotangents that are structurally zero
(`symbolic_zeros`) leave their products out.

One convention keeps the chain short. `output` and `lse` (and its tail) enter `backward` and `double_backward` as
arrays, but their rules differentiate the whole dependence on query, key and value, through output
and lse as well, and give output and lse no cotangent of their own. That is exact as long as they
are what `forward` made of the same query, key and value, which holds for every caller here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jttt import masks, passes, reference
from jttt.spec import AttentionSpec

Arrays = dict[str, jax.Array | None]

# Names by which a `jax.checkpoint` policy can save what `forward` made.
OUTPUT_NAME = "attention_output"
LSE_NAME = "attention_lse"

# What can be differentiated; the other inputs say what is visible (`masks.OPERANDS`).
_INPUTS = ("query", "key", "value", "bias", "sinks")


@jax.tree_util.register_static
class _Wanted(frozenset[str]):
    """Names of the arguments that are being differentiated, carried among a rule's residuals."""


def _split(arguments: Any) -> tuple[Any, _Wanted]:
    """The values of a rule's perturbation-tracking arguments, and the names of the perturbed ones."""
    values = {name: None if x is None else x.value for name, x in arguments.items()}
    wanted = _Wanted(name for name, x in arguments.items() if x is not None and x.perturbed)
    return values, wanted


def _nonzero(cotangent: Any) -> jax.Array | None:
    """The cotangent, or None where it is structurally zero."""
    return None if cotangent is None or isinstance(cotangent, SymbolicZero) else cotangent


def _selected(cotangents: Arrays, arguments: Arrays) -> Arrays:
    """One entry for each argument, None (a zero) where there is no cotangent."""
    return {name: cotangents.get(name) for name in arguments}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(spec: AttentionSpec, inputs: Arrays) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`(output, lse, lse_tail)` of canonical inputs, named and shaped as in `reference.py`.

    query, key and value; bias and sinks, or None; and any of `masks.OPERANDS`. lse_tail is for the
    derivatives alone, and None without a bias.
    """
    wanted = ("output", "lse") if inputs["bias"] is None else ("output", "lse", "lse_tail")
    results = passes.run("forward", spec, inputs, wanted)
    return results["output"], results["lse"], results.get("lse_tail")


def _attention_fwd(spec: AttentionSpec, inputs):
    inputs, wanted = _split(inputs)
    output, lse, tail = attention(spec, inputs)
    output, lse = checkpoint_name(output, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    tail = None if tail is None else checkpoint_name(tail, LSE_NAME)
    return (output, lse, tail), (inputs, output, lse, tail, wanted)


def _attention_bwd(spec: AttentionSpec, residuals, cotangents):
    inputs, output, lse, tail, wanted = residuals
    d_output, d_lse = map(_nonzero, cotangents[:2])
    if d_output is None and d_lse is None:
        return (_selected({}, inputs),)
    if d_output is None:
        d_output = jnp.zeros_like(output)
    if _rows_may_be_empty(spec, inputs):
        # Whatever the caller made of a row that sees nothing, an infinity or a NaN, has no gradient.
        empty = lse == -jnp.inf
        d_output = jnp.where(jnp.swapaxes(empty, -1, -2)[..., None], 0, d_output)
        d_lse = None if d_lse is None else jnp.where(empty, 0, d_lse)
    arguments = {**inputs, "output": output, "lse": lse, "lse_tail": tail, "d_output": d_output, "d_lse": d_lse}
    gradients = backward(spec, wanted, arguments)
    return (_selected({name: gradients[f"d_{name}"] for name in wanted}, inputs),)


def _rows_may_be_empty(spec: AttentionSpec, inputs: Arrays) -> bool:
    band = spec.band
    return (band.left is not None or (band.right is not None and band.right < 0)
            or any(inputs[name] is not None for name in ("bias", *masks.OPERANDS)))


attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def backward(spec: AttentionSpec, wanted: _Wanted, arguments: Arrays) -> dict[str, jax.Array]:
    """Gradients of the wanted inputs: d_query, d_key, d_value, d_bias, d_sinks.

    Arguments: the inputs, output, lse, lse_tail, and the cotangents d_output and d_lse (None if zero).
    """
    operands = _backward_operands(arguments)
    results = passes.run("backward", spec, operands,
                         [f"d_{name}" for name in _INPUTS if name in wanted and name != "sinks"])
    if "sinks" in wanted:
        results["d_sinks"] = reference.sink_gradient(arguments["sinks"], operands["lse"], operands["delta"])
    return results


def _backward_operands(arguments: Arrays) -> Arrays:
    """The arguments of `backward` as its pass takes them."""
    delta = reference.delta(arguments["output"], arguments["d_output"], arguments["d_lse"])
    passed = {name: x for name, x in arguments.items() if name not in ("sinks", "output", "d_lse")}
    return {**passed, "delta": delta}


def _backward_fwd(spec: AttentionSpec, wanted: _Wanted, arguments):
    arguments, perturbed = _split(arguments)
    return backward(spec, wanted, arguments), (arguments, perturbed)


def _backward_bwd(spec: AttentionSpec, wanted: _Wanted, residuals, cotangents):
    arguments, perturbed = residuals
    direction = {f"t_{name}": _nonzero(cotangents.get(f"d_{name}")) for name in _INPUTS}
    if all(t is None for t in direction.values()):
        return (_selected({}, arguments),)
    gradients = double_backward(spec, perturbed, {**arguments, **direction})
    return (_selected(gradients, arguments),)


backward.defvjp(_backward_fwd, _backward_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def double_backward(spec: AttentionSpec, wanted: _Wanted, arguments: Arrays) -> Arrays:
    """Cotangents of the arguments of `backward`, by their names, those that are wanted.

    Arguments: those of `backward` and the direction t_query, …, the cotangents of d_query, …
    (None if zero).
    """
    operands = _backward_operands(arguments)
    t_sinks = operands.pop("t_sinks")
    columns = ("t_lse", "row_term")
    first = passes.run(
        "tangent", spec,
        {**operands, "output": arguments["output"], "sinks": arguments["sinks"], "t_sinks": t_sinks},
        ("t_output", *columns) if "d_output" in wanted else columns)
    # Where nothing moves the scores, E of the design note is zero and so is the gradient of value.
    moves = any(arguments[f"t_{name}"] is not None for name in ("query", "key", "bias", "sinks"))
    names = [name for name in ("query", "key", "value", "bias") if name in wanted and (moves or name != "value")]
    second = passes.run("double_backward", spec,
                        {**operands, "row_term": first["row_term"], "t_lse": first["t_lse"] if moves else None},
                        [f"g_{name}" for name in names])
    results = {name: second[f"g_{name}"] for name in names}
    if "sinks" in wanted:
        results["sinks"] = reference.sink_second_order(
            arguments["sinks"], operands["lse"], operands["delta"], first["row_term"], t_sinks)
    if "d_output" in wanted:
        results["d_output"] = first["t_output"]
    if "d_lse" in wanted:
        results["d_lse"] = first["t_lse"]
    return results


def _double_backward_fwd(spec: AttentionSpec, wanted: _Wanted, arguments: Arrays):
    results = double_backward(spec, wanted, arguments)
    return results, (arguments, _Wanted(results))


def _double_backward_bwd(spec: AttentionSpec, wanted: _Wanted, residuals, cotangents):
    arguments, returned = residuals
    moving = {name: x for name, x in arguments.items()
              if name in (*_INPUTS, "d_output", "d_lse", *(f"t_{name}" for name in _INPUTS))}
    hidden = {name: arguments[name] for name in masks.OPERANDS}
    made = {name: f"g_{name}" for name in _INPUTS} | {"d_output": "t_output", "d_lse": "t_lse"}

    def whole(moving: Arrays) -> Arrays:
        results = reference.second_order(spec, **moving, **hidden)
        return {name: results[made[name]] for name in returned}

    _, pull_back = jax.vjp(whole, moving)
    return (_selected(pull_back(cotangents)[0], arguments),)


double_backward.defvjp(_double_backward_fwd, _double_backward_bwd)
