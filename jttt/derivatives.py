"""The chain of derivative rules: attention, its tangent, its backward, and the backward of that.

    attention           forward
      tangent           tangent                     the map of input tangents to those of output and lse
      backward          backward                    its transpose, the map of cotangents the other way
        double_backward tangent, double_backward    the transpose of backward's tangent

Everything follows from one scalar, Φ(x; d, t) = ⟨d, ∂attention(x) t⟩, of the inputs x, cotangents d of
output and log-sum-exp, and tangents t of the inputs:

    tangent = ∂Φ/∂d        backward = ∂Φ/∂t        double_backward = ∂Φ/∂(x, d)

Each is a function with a rule for its tangents (`rules.py`) around passes of `passes.py`. The rule calls
the function itself, and makes the tangents of its results by a linear map that is evaluated by some of the
others and transposed by others again:

    function           tangents of its results, evaluated     transposed
    attention          tangent                                backward
    backward           double_backward + backward             double_backward
    tangent            jvp of jvp of plain formulas, tangent  double_backward, backward
    double_backward    jvp of `reference.second_order`        vjp of `reference.second_order`

(the second row since ⟨d, attention⟩ has a symmetric second derivative in the inputs).

So reverse over reverse, forward over reverse and reverse over forward run kernels end to end; order
three and up, and forward over forward, differentiate plain formulas, exactly. Derivatives that nobody
asked for, and tangents and cotangents that are structurally zero, leave their products out.

One convention keeps the chain short. `output` and `lse` (and its tail) enter the functions below
`attention` as arrays, but their rules differentiate the whole dependence on the inputs, through output
and lse as well, and look at no tangent of output and lse. That is exact as long as they are what
`forward` made of the same inputs, which holds for every caller here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jttt import masks, partition, passes, reference
from jttt.rules import Arrays, Differentiable, linear_map
from jttt.spec import AttentionSpec

# Names by which a `jax.checkpoint` policy can save what `forward` made.
OUTPUT_NAME = "attention_output"
LSE_NAME = "attention_lse"

# What can be differentiated; the other inputs say what is visible (`masks.OPERANDS`).
_INPUTS = ("query", "key", "value", "bias", "sinks")
_COTANGENTS = ("d_output", "d_lse")
_DIRECTION = tuple(f"t_{name}" for name in _INPUTS)


def _among(names: Collection[str], arrays: Arrays) -> Arrays:
    return {name: x for name, x in arrays.items() if name in names}


def _as_direction(tangents: Arrays) -> Arrays:
    """Tangents of the inputs by their names as a direction: t_query, …, None where there is none."""
    return {f"t_{name}": tangents.get(name) for name in _INPUTS}


def _sum(parts: list[Arrays]) -> Arrays:
    """The sum, name by name, of results that may lack names."""
    total: Arrays = {}
    for part in parts:
        total |= {name: total[name] + x if name in total else x for name, x in part.items()}
    return total


# Order zero.


@Differentiable
def attention(spec: AttentionSpec, inputs: Arrays) -> Arrays:
    """output, lse, and lse_tail if there is a bias, of canonical inputs, named and shaped as in `reference.py`.

    Inputs: query, key and value; bias and sinks, or None; and any of `masks.OPERANDS`. lse_tail is for
    the derivatives alone.
    """
    wanted = ("output", "lse") if inputs["bias"] is None else ("output", "lse", "lse_tail")
    return passes.run("forward", spec, inputs, wanted)


@attention.defjvp
def _attention_jvp(spec: AttentionSpec, inputs: Arrays, moved: Arrays) -> tuple[Arrays, Arrays]:
    results = attention(spec, inputs)
    results = {name: checkpoint_name(x, OUTPUT_NAME if name == "output" else LSE_NAME) for name, x in results.items()}
    made = linear_map(functools.partial(_attention_tangent, spec), functools.partial(_attention_transposed, spec),
                      {**inputs, **results, "lse_tail": results.get("lse_tail")}, _among(_INPUTS, moved))
    return results, made


def _attention_tangent(spec: AttentionSpec, arguments: Arrays, moved: Arrays) -> Arrays:
    return tangent(spec, {**arguments, **_as_direction(moved)})


def _attention_transposed(spec: AttentionSpec, arguments: Arrays, cotangents: Arrays, wanted: frozenset[str]) -> Arrays:
    gradients = backward(spec, wanted, {**arguments, **_arriving(spec, arguments, cotangents)})
    return {name: gradients[f"d_{name}"] for name in wanted}


def _arriving(spec: AttentionSpec, arguments: Arrays, cotangents: Arrays) -> Arrays:
    """d_output and d_lse from the cotangents of output and lse, zero for rows that see nothing."""
    d_output, d_lse = cotangents.get("output"), cotangents.get("lse")
    if d_output is None:
        d_output = jnp.zeros_like(arguments["output"])
    if _rows_may_be_empty(spec, arguments):
        # Whatever the caller made of a row that sees nothing, an infinity or a NaN, has no gradient.
        empty = arguments["lse"] == -jnp.inf
        d_output = jnp.where(jnp.swapaxes(empty, -1, -2)[..., None], 0, d_output)
        d_lse = None if d_lse is None else jnp.where(empty, 0, d_lse)
    return dict(d_output=d_output, d_lse=d_lse)


def _rows_may_be_empty(spec: AttentionSpec, inputs: Arrays) -> bool:
    band = spec.band
    return (band.left is not None or (band.right is not None and band.right < 0)
            or any(inputs[name] is not None for name in ("bias", *masks.OPERANDS)))


# Order one.


@Differentiable
def tangent(spec: AttentionSpec, arguments: Arrays) -> Arrays:
    """Tangents of output and lse, by these names, along the direction t_query, … (None if zero).

    Arguments: the inputs, output, lse, lse_tail, and the direction.
    """
    made = passes.run("tangent", spec, arguments, ("t_output", "t_lse"))
    return dict(output=made["t_output"], lse=made["t_lse"])


@tangent.defjvp
def _tangent_jvp(spec: AttentionSpec, arguments: Arrays, moved: Arrays) -> tuple[Arrays, Arrays]:
    results = tangent(spec, arguments)
    made = linear_map(functools.partial(_tangent_tangent, spec), functools.partial(_tangent_transposed, spec),
                      arguments, _among((*_INPUTS, *_DIRECTION), moved))
    return results, made


def _tangent_tangent(spec: AttentionSpec, arguments: Arrays, moved: Arrays) -> Arrays:
    def twice(arguments: Arrays, moved: Arrays) -> Arrays:
        inputs = {name: arguments[name] for name in _INPUTS}
        direction = {name: arguments[f"t_{name}"] for name in _INPUTS if arguments[f"t_{name}"] is not None}
        hidden = {name: arguments[name] for name in masks.OPERANDS}

        def outputs(inputs: Arrays) -> Arrays:
            made = reference.forward(spec, **inputs, **hidden)
            return dict(output=made["output"], lse=made["lse"])

        return _along(lambda inputs: _along(outputs, inputs, direction), inputs, moved)

    parts = []
    if moved_inputs := _among(_INPUTS, moved):
        parts.append(partition.automatic(twice, _among(("output", "lse"), arguments))(arguments, moved_inputs))
    if moved_direction := _among(_DIRECTION, moved):
        parts.append(tangent(spec, {**arguments, **dict.fromkeys(_DIRECTION), **moved_direction}))
    return _sum(parts)


def _along(function: Callable[[Arrays], Arrays], arguments: Arrays, direction: Arrays) -> Arrays:
    """The tangents of the function's results along a direction in some of its arguments."""
    moving = {name: arguments[name] for name in direction}
    return jax.jvp(lambda moving: function({**arguments, **moving}), (moving,), (direction,))[1]


def _tangent_transposed(spec: AttentionSpec, arguments: Arrays, cotangents: Arrays, wanted: frozenset[str]) -> Arrays:
    arguments = {**arguments, **_arriving(spec, arguments, cotangents)}
    gradients = backward(spec, frozenset(name[2:] for name in wanted.intersection(_DIRECTION)),
                         {name: x for name, x in arguments.items() if name not in _DIRECTION})
    directions = {f"t_{name[2:]}": x for name, x in gradients.items()}
    return directions | double_backward(spec, wanted.intersection(_INPUTS), arguments)


@Differentiable
def backward(spec: AttentionSpec, wanted: frozenset[str], arguments: Arrays) -> Arrays:
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


@backward.defjvp
def _backward_jvp(spec: AttentionSpec, wanted: frozenset[str], arguments: Arrays, moved: Arrays
                  ) -> tuple[Arrays, Arrays]:
    results = backward(spec, wanted, arguments)
    made = linear_map(functools.partial(_backward_tangent, spec, wanted), functools.partial(_backward_transposed, spec),
                      arguments, _among((*_INPUTS, *_COTANGENTS), moved))
    return results, made


def _backward_tangent(spec: AttentionSpec, wanted: frozenset[str], arguments: Arrays, moved: Arrays) -> Arrays:
    parts = []
    if moved_inputs := _among(_INPUTS, moved):
        second = double_backward(spec, wanted, {**arguments, **_as_direction(moved_inputs)})
        parts.append({f"d_{name}": x for name, x in second.items()})
    if moved_cotangents := _among(_COTANGENTS, moved):
        still = dict(d_output=jnp.zeros_like(arguments["d_output"]), d_lse=None)
        parts.append(backward(spec, wanted, {**arguments, **still, **moved_cotangents}))
    return _sum(parts)


def _backward_transposed(spec: AttentionSpec, arguments: Arrays, cotangents: Arrays, wanted: frozenset[str]) -> Arrays:
    direction = {f"t_{name}": cotangents.get(f"d_{name}") for name in _INPUTS}
    return double_backward(spec, wanted, {**arguments, **direction})


# Order two.


@Differentiable
def double_backward(spec: AttentionSpec, wanted: frozenset[str], arguments: Arrays) -> Arrays:
    """Derivatives of Φ in the wanted inputs and cotangents, by their names, save those that are zero.

    Arguments: those of `backward` and the direction t_query, … (None if zero).
    """
    if not wanted:
        return {}
    operands = _backward_operands(arguments)
    t_sinks, delta = operands.pop("t_sinks"), operands.pop("delta")
    columns = ("t_lse", "row_term")
    first = passes.run(
        "tangent", spec,
        {**operands, "output": arguments["output"], "sinks": arguments["sinks"], "t_sinks": t_sinks},
        ("t_output", *columns) if "d_output" in wanted else columns)
    # Where nothing moves the scores, E of the design note is zero and so is the gradient of value.
    moves = any(arguments[f"t_{name}"] is not None for name in ("query", "key", "bias", "sinks"))
    names = [name for name in ("query", "key", "value", "bias") if name in wanted and (moves or name != "value")]
    second = passes.run(
        "double_backward", spec,
        {**operands, "delta": delta, "row_term": first["row_term"], "t_lse": first["t_lse"] if moves else None},
        [f"g_{name}" for name in names])
    results = {name: second[f"g_{name}"] for name in names}
    if "sinks" in wanted:
        results["sinks"] = reference.sink_second_order(
            arguments["sinks"], operands["lse"], delta, first["t_lse"], first["row_term"], t_sinks)
    if "d_output" in wanted:
        results["d_output"] = first["t_output"]
    if "d_lse" in wanted:
        results["d_lse"] = first["t_lse"]
    return results


@double_backward.defjvp
def _double_backward_jvp(spec: AttentionSpec, wanted: frozenset[str], arguments: Arrays, moved: Arrays
                         ) -> tuple[Arrays, Arrays]:
    results = double_backward(spec, wanted, arguments)
    made = linear_map(functools.partial(_double_backward_tangent, spec, tuple(results)),
                      functools.partial(_double_backward_transposed, spec),
                      arguments, _among((*_INPUTS, *_COTANGENTS, *_DIRECTION), moved))
    return results, made


def _double_backward_tangent(spec: AttentionSpec, names: Collection[str], arguments: Arrays, moved: Arrays) -> Arrays:
    along = functools.partial(_along, functools.partial(_second_order, spec, names))
    return partition.automatic(along, _among(names, arguments))(arguments, moved)


def _double_backward_transposed(spec: AttentionSpec, arguments: Arrays, cotangents: Arrays, wanted: frozenset[str]
                                ) -> Arrays:
    def gradients(moving: Arrays, arguments: Arrays, cotangents: Arrays) -> Arrays:
        _, pull_back = jax.vjp(lambda moving: _second_order(spec, cotangents, {**arguments, **moving}), moving)
        return pull_back(cotangents)[0]

    moving = _among(wanted, arguments)
    return partition.automatic(gradients, moving)(moving, arguments, cotangents)


def _second_order(spec: AttentionSpec, names: Collection[str], arguments: Arrays) -> Arrays:
    """The named results of `double_backward` as a function of its true inputs alone, in plain formulas."""
    inputs = {name: x for name, x in arguments.items() if name not in ("output", "lse", "lse_tail")}
    results = reference.second_order(spec, **inputs)
    made = {name: f"g_{name}" for name in _INPUTS} | {"d_output": "t_output", "d_lse": "t_lse"}
    return {name: results[made[name]] for name in names}
