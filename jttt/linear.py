"""A primitive for a linear map that knows its transpose.

The tangent of a function by a rule of ours is linear in the tangents of its arguments. Forward mode
evaluates that map; reverse mode never does, but transposes it. JAX transposes what it is made of,
and has no transpose of a kernel, so the map is bound as one equation that says how.

Evaluating, mapping (vmap) and differentiating the equation is evaluating, mapping and differentiating
the function it stands for, whose jaxpr it carries; so that function may in turn be one that has a
rule. Transposing calls `transpose`, inline, where the cotangents are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Arrays = dict[str, jax.Array | None]


def linear_map(function: Callable[[Arrays, Arrays], Arrays],
               transpose: Callable[[Arrays, Arrays, frozenset[str]], Arrays],
               residuals: Arrays, tangents: Arrays) -> Arrays:
    """`function(residuals, tangents)`, which is linear in the tangents, jointly.

    `transpose(residuals, cotangents, wanted)` returns the cotangents of those tangents that are
    wanted, leaving out any that are zero, from those of the function's results that are not.
    """
    if not tangents:
        return {}
    arguments, in_tree = jax.tree.flatten((residuals, tangents))
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(residuals, tangents)
    out_tree = jax.tree.structure(shapes)
    results = _linear_map_p.bind(*arguments, jaxpr=jaxpr, transpose=transpose, in_tree=in_tree, out_tree=out_tree)
    return jax.tree.unflatten(out_tree, results)


def _evaluate(*arguments, jaxpr, **params) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*arguments)


def _abstract(*avals, jaxpr, **params):
    return jaxpr.out_avals


def _batch(arguments, axes, *, jaxpr, transpose, in_tree, out_tree):
    arguments = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arguments, axes, strict=True)]
    axes = [None if axis is None else 0 for axis in axes]
    residual_axes, tangent_axes = jax.tree.unflatten(in_tree, axes)

    def function(residuals, tangents):
        results = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes)(*jax.tree.leaves((residuals, tangents)))
        return jax.tree.unflatten(out_tree, results)

    def mapped_transpose(residuals, cotangents, wanted):
        cotangents = jax.vmap(lambda *x: transpose(*x, wanted), in_axes=(residual_axes, 0))(residuals, cotangents)
        # A tangent that was not mapped went into every entry of the batch.
        return {name: jnp.sum(x, 0) if tangent_axes[name] is None else x for name, x in cotangents.items()}

    results = linear_map(function, mapped_transpose, *jax.tree.unflatten(in_tree, arguments))
    results = jax.tree.leaves(results)
    return results, [0] * len(results)


def _jvp(primals, tangents, *, jaxpr, **params):
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def function(*moved):
        arguments = list(primals)
        for i, x in zip(moving, moved, strict=True):
            arguments[i] = x
        return jaxpr_as_fun(jaxpr)(*arguments)

    return jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose(cotangents, *arguments, transpose, in_tree, out_tree, **params):
    residuals, tangents = jax.tree.unflatten(in_tree, arguments)
    named = {name: x for name, x in jax.tree.unflatten(out_tree, cotangents).items() if type(x) is not ad.Zero}
    wanted = frozenset(name for name, x in tangents.items() if ad.is_undefined_primal(x))
    made = transpose(residuals, named, wanted) if named else {}
    returned = {name: made.get(name, ad.Zero(x.aval)) for name, x in tangents.items() if name in wanted}
    # The order of leaves is that of the sorted names.
    return [None] * (len(arguments) - len(tangents)) + [returned.get(name) for name in sorted(tangents)]


_linear_map_p: Any = Primitive("attention_linear_map")
_linear_map_p.multiple_results = True
_linear_map_p.def_impl(_evaluate)
_linear_map_p.def_abstract_eval(_abstract)
mlir.register_lowering(_linear_map_p, mlir.lower_fun(_evaluate, multiple_results=True))
batching.primitive_batchers[_linear_map_p] = _batch
ad.primitive_jvps[_linear_map_p] = _jvp
ad.primitive_transposes[_linear_map_p] = _transpose
