"""A pass of the modes as one JAX primitive; see `jttt/passes.py` for why.

The passes are the functions of `plain.py` that return named results. Each has one kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from jttt import passes
from jttt.modes import plain
from jttt.partition import plain_arrays
from jttt.passes import takes_kernels, varying
from jttt.spec import AttentionSpec


def run(name: str, spec: AttentionSpec, **operands: jax.Array) -> dict[str, jax.Array]:
    """Runs pass `name` on named operands, all with the same axis of heads; returns its outputs by name."""
    made = jax.eval_shape(functools.partial(getattr(plain, name), spec), **operands)
    outputs = _pass_p.bind(*operands.values(), name=name, spec=spec, operands=tuple(operands))
    return dict(zip(made, outputs, strict=True))


def _with_plain(*arrays, name, spec, operands) -> list[jax.Array]:
    # Leaves of a dictionary come in the order of its keys, here as in `run`.
    return jax.tree.leaves(getattr(plain, name)(spec, **dict(zip(operands, arrays, strict=True))))


def _with_kernels(*arrays, name, spec, operands) -> list[jax.Array]:
    from jttt.modes import kernels  # Triton is not installed everywhere.

    by_name = dict(zip(operands, arrays, strict=True))
    made = jax.eval_shape(functools.partial(getattr(plain, name), spec), **by_name)
    return jax.tree.leaves(kernels.run(name, spec, by_name, made, passes.compute_capability()))


def _lower(ctx: mlir.LoweringRuleContext, *args, spec: AttentionSpec, **params):
    rule = _with_kernels if takes_kernels(ctx, spec.implementation) else _with_plain
    # Neither kernels nor plain formulas need to know what varies in a `jax.shard_map`.
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
    with plain_arrays():
        return mlir.lower_fun(rule, multiple_results=True)(ctx, *args, spec=spec, **params)


def _abstract(*avals, **params):
    with plain_arrays():
        outputs = jax.eval_shape(functools.partial(_with_plain, **params),
                                 *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
    where = NamedSharding(avals[0].sharding.mesh, PartitionSpec())
    varies = ManualAxisType(varying=varying(*avals))
    return [jax.core.ShapedArray(x.shape, x.dtype, sharding=where, manual_axis_type=varies) for x in outputs]


def _batch(arrays, axes, **params):
    """A mapped axis joins that of the heads; what is not mapped is repeated along it."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    arrays = [jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(jnp.asarray(x), axis, 0)
              for x, axis in zip(arrays, axes, strict=True)]
    outputs = _pass_p.bind(*(x.reshape(-1, *x.shape[2:]) for x in arrays), **params)
    return [x.reshape(size, -1, *x.shape[1:]) for x in outputs], [0] * len(outputs)


_pass_p = Primitive("attention_mode_pass")
_pass_p.multiple_results = True
_pass_p.def_impl(functools.partial(xla.apply_primitive, _pass_p))
_pass_p.def_abstract_eval(_abstract)
mlir.register_lowering(_pass_p, _lower)
mlir.register_lowering(_pass_p, _lower, platform="cuda")
batching.primitive_batchers[_pass_p] = _batch
