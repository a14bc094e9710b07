"""What a function would run, read from its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def passes(function: Callable, *arrays: Any) -> list[Any]:
    """The equations that bind a pass of `jttt.passes`, in order, at any depth."""
    return list(_passes(jax.make_jaxpr(function)(*arrays).jaxpr))


def names(function: Callable, *arrays: Any) -> list[str]:
    """The names of those passes."""
    return [equation.params["name"] for equation in passes(function, *arrays)]


def operands(equation: Any) -> dict[str, Any]:
    """Shape and dtype of each operand of a pass, by name."""
    return dict(zip(equation.params["operands"], [x.aval for x in equation.invars], strict=True))


def _passes(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "attention_pass":
            yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(parameter, "eqns"):
                yield from _passes(getattr(parameter, "jaxpr", parameter))
