"""Two primitives: a function with a rule for its tangents, and a linear map with its transpose.

`jax.custom_jvp` and `jax.custom_derivatives.linear_call` are made for this, but linear_call has no
vmap, and custom_jvp loses its rule where JAX evaluates a part of a program early (what does not change
in a scanned loop), which leaves kernels that JAX cannot differentiate. An equation of ours stays whole.

The two differ in what they know besides the jaxpr of the function that they stand for. Evaluating and
mapping either is evaluating and mapping that function, which may in turn be made of such equations. The
tangents of a linear map in all that it depends on are those of its function; only to transpose it does
JAX need to be told how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Arrays = dict[str, jax.Array | None]


class Differentiable:
    """A function of static arguments and of named arrays, to named arrays, whose tangents a rule makes.

    The rule, given to `defjvp`, takes the same arguments and the tangents by name, leaving out those
    that are zero; it returns the results and their tangents, leaving out those that are zero.
    """

    def __init__(self, function: Callable[..., Arrays]):
        functools.update_wrapper(self, function)
        self.function = function
        self.rule: Callable[..., tuple[Arrays, Arrays]] | None = None

    def defjvp(self, rule: Callable[..., tuple[Arrays, Arrays]]) -> Callable[..., tuple[Arrays, Arrays]]:
        self.rule = rule
        return rule

    def __call__(self, *static_and_arguments) -> Arrays:
        *static, arguments = static_and_arguments
        return _bind(_differentiable_p, functools.partial(self.function, *static), (arguments,),
                     jvp=functools.partial(self.rule, *static))


def linear_map(function: Callable[[Arrays, Arrays], Arrays],
               transpose: Callable[[Arrays, Arrays, frozenset[str]], Arrays],
               residuals: Arrays, tangents: Arrays) -> Arrays:
    """`function(residuals, tangents)`, which is linear in the tangents, jointly.

    Forward mode evaluates it; reverse mode never does, but calls `transpose(residuals, cotangents,
    wanted)`, which returns the cotangents of those tangents that are wanted, leaving out any that are
    zero, from those of the function's results that are not.
    """
    return _bind(_linear_map_p, function, (residuals, tangents), transpose=transpose) if tangents else {}


def _bind(primitive: Any, function: Callable[..., Arrays], arguments: tuple[Arrays, ...], **rule: Any) -> Arrays:
    flat, in_tree = jax.tree.flatten(arguments)
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    out_tree = jax.tree.structure(shapes)
    results = primitive.bind(*flat, jaxpr=jaxpr, in_tree=in_tree, out_tree=out_tree, **rule)
    return jax.tree.unflatten(out_tree, results)


def _evaluate(*flat, jaxpr, **params) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*flat)


def _abstract(*avals, jaxpr, **params):
    return jaxpr.out_avals


def _mapped(flat, axes, jaxpr, in_tree, out_tree):
    """The mapped function, its arguments with mapped axes in front, and these axes, 0 or None."""
    flat = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(flat, axes, strict=True)]
    axes = [None if axis is None else 0 for axis in axes]

    def function(*arguments):
        results = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(out_tree, results)

    return function, jax.tree.unflatten(in_tree, flat), jax.tree.unflatten(in_tree, axes)


def _front(results: Arrays) -> tuple[list[jax.Array], list[int]]:
    flat = jax.tree.leaves(results)
    return flat, [0] * len(flat)


def _batch_differentiable(flat, axes, *, jaxpr, in_tree, out_tree, jvp):
    function, arguments, (argument_axes,) = _mapped(flat, axes, jaxpr, in_tree, out_tree)

    def mapped_jvp(arguments, moved):
        return jax.vmap(jvp, in_axes=(argument_axes, {name: argument_axes[name] for name in moved}))(arguments, moved)

    return _front(_bind(_differentiable_p, function, arguments, jvp=mapped_jvp))


def _batch_linear_map(flat, axes, *, jaxpr, in_tree, out_tree, transpose):
    function, arguments, (residual_axes, tangent_axes) = _mapped(flat, axes, jaxpr, in_tree, out_tree)

    def mapped_transpose(residuals, cotangents, wanted):
        cotangents = jax.vmap(lambda *x: transpose(*x, wanted), in_axes=(residual_axes, 0))(residuals, cotangents)
        # A tangent that was not mapped went into every entry of the batch.
        return {name: jnp.sum(x, 0) if tangent_axes[name] is None else x for name, x in cotangents.items()}

    return _front(_bind(_linear_map_p, function, arguments, transpose=mapped_transpose))


def _jvp_differentiable(primals, tangents, *, in_tree, jvp, **params):
    (arguments,) = jax.tree.unflatten(in_tree, primals)
    # The order of leaves is that of the sorted names.
    names = sorted(name for name, x in arguments.items() if x is not None)
    moved = {name: t for name, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
    results, made = jvp(arguments, moved)
    zeros = {name: ad.Zero(jax.typeof(x).to_tangent_aval()) for name, x in results.items() if name not in made}
    return [results[name] for name in sorted(results)], [(made | zeros)[name] for name in sorted(results)]


def _jvp_linear_map(primals, tangents, *, jaxpr, **params):
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def function(*moved):
        flat = list(primals)
        for i, x in zip(moving, moved, strict=True):
            flat[i] = x
        return jaxpr_as_fun(jaxpr)(*flat)

    return jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose_linear_map(cotangents, *flat, in_tree, out_tree, transpose, **params):
    residuals, tangents = jax.tree.unflatten(in_tree, flat)
    named = {name: x for name, x in jax.tree.unflatten(out_tree, cotangents).items() if type(x) is not ad.Zero}
    wanted = frozenset(name for name, x in tangents.items() if ad.is_undefined_primal(x))
    made = transpose(residuals, named, wanted) if named else {}
    returned = {name: made.get(name, ad.Zero(x.aval)) for name, x in tangents.items() if name in wanted}
    return [None] * (len(flat) - len(tangents)) + [returned.get(name) for name in sorted(tangents)]


def _primitive(name: str, batch: Callable, jvp: Callable) -> Any:
    primitive: Any = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_evaluate)
    primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(_evaluate, multiple_results=True))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


_differentiable_p = _primitive("attention_function", _batch_differentiable, _jvp_differentiable)
_linear_map_p = _primitive("attention_linear_map", _batch_linear_map, _jvp_linear_map)
ad.primitive_transposes[_linear_map_p] = _transpose_linear_map
