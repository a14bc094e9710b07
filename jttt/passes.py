"""The four passes of attention as one JAX primitive, and who carries them out.

A pass is what the derivative rules are made of: `forward`, `backward`, `tangent` and
`double_backward`, described in `reference.py`. Binding a primitive, rather than calling an
implementation, puts off the choice between kernels and plain formulas until the platform that the
computation is lowered for is known, and gives every pass one batching rule: a mapped axis joins
the batch of one launch, an unmapped operand keeps a batch axis of size one and is not copied. What
several devices each do of a pass is in `partition.py`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence, Set

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax._src.interpreters.mlir import lower_with_sharding_in_types
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import ManualAxisType, NamedSharding

from jttt import partition, parts, reference
from jttt.spec import AttentionSpec, Implementation


def run(name: str, spec: AttentionSpec, operands: dict[str, jax.Array | None], wanted: Sequence[str]
        ) -> dict[str, jax.Array]:
    """Runs pass `name` on named operands and returns the wanted ones of its outputs, by name.

    Operands are as in `reference.py`, with the same number of batch axes each; a batch axis may
    have size one in some of them. Operands that are None are absent. Work that only serves outputs
    that are not wanted is left out.
    """
    if not wanted:
        return {}
    present = varying_alike({key: x for key, x in operands.items() if x is not None})
    if spec.ring is not None:
        return parts.run(run, name, spec, present, wanted)
    outputs = _pass_p.bind(*present.values(), name=name, spec=spec, operands=tuple(present),
                           wanted=tuple(wanted))
    return dict(zip(wanted, outputs, strict=True))


def varying_alike(arrays: dict[str, jax.Array | None], axes: Set[str] = frozenset()) -> dict[str, jax.Array | None]:
    """The arrays, each typed as varying over `axes` of a `jax.shard_map` and those over which one of them varies."""
    axes = varying(*(jax.typeof(x) for x in arrays.values() if x is not None)) | axes

    def cast(x: jax.Array | None) -> jax.Array | None:
        missing = () if x is None else tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return {name: cast(x) for name, x in arrays.items()}


def runs_triton(platform: str) -> bool:
    """Whether a computation lowered for `platform` runs Triton kernels unless told otherwise."""
    return platform == "cuda" and _triton_is_installed() and compute_capability() >= 80


def interprets_triton() -> bool:
    """Whether Triton's interpreter was asked for, which runs kernels on any machine."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_cuda() -> None:
    """Raises where kernels for CUDA cannot be made in this process, whatever the machine."""
    if interprets_triton():
        raise RuntimeError(
            "TRITON_INTERPRET was 1, but the computation is lowered for CUDA: Triton's interpreter makes no "
            "programs and runs on the CPU alone. Expected TRITON_INTERPRET unset before Python starts, a "
            "computation on the CPU, or implementation='xla'.")
    if not _makes_cuda_calls():
        raise RuntimeError(
            "JAX's CUDA plugin is not installed, but the computation is lowered for CUDA: expected "
            "`pip install 'jax[cuda13]'` (or cuda12); no GPU is needed to lower. implementation='xla' needs "
            "no plugin.")


@functools.cache
def _triton_is_installed() -> bool:
    try:
        import jax_triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _makes_cuda_calls() -> bool:
    """Whether jax-triton finds the part of JAX's CUDA plugin that it makes its calls with."""
    from jaxlib import gpu_triton

    return hasattr(gpu_triton, "TritonKernel")


@functools.cache
def compute_capability() -> int:
    """Of the first CUDA device, or 90 where a program is exported without one: 8.6 gives 86."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return 90
    return int(device.compute_capability.replace(".", ""))


def _with_reference(*arrays, name, spec, operands, wanted) -> list[jax.Array]:
    by_name = dict(zip(operands, arrays, strict=True))
    results = getattr(reference, name)(spec, **by_name)
    batch = _batch_shape(by_name)
    # A bias is summed over the innermost batch axis, B, where it lacks it; the outer ones are vmap's.
    own = {key: len(batch) - 1 if key.endswith("_bias") else len(batch) for key in wanted}
    return [jnp.broadcast_to(results[key], batch[:own[key]] + results[key].shape[own[key]:]) for key in wanted]


def _with_kernels(*arrays, name, spec, operands, wanted) -> list[jax.Array]:
    from jttt import kernels  # Triton takes a second to import and is not installed everywhere.

    by_name = dict(zip(operands, arrays, strict=True))
    results = kernels.run(name, spec, by_name, wanted, _batch_shape(by_name), compute_capability())
    return [results[key] for key in wanted]


def _batch_shape(operands: dict[str, jax.Array]) -> tuple[int, ...]:
    axes = operands["query"].ndim - 3
    return jnp.broadcast_shapes(*(x.shape[:axes] for x in operands.values()))


def takes_kernels(ctx: mlir.LoweringRuleContext, implementation: Implementation | None) -> bool:
    """Whether a pass that is being lowered becomes kernels; an error if it must and cannot."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if implementation == "triton" and interprets_triton():
        return True
    can = all(map(runs_triton, platforms)) and all(x.dtype != jnp.float64 for x in ctx.avals_in)
    if implementation == "triton" and not can:
        raise ValueError(
            f"implementation was 'triton', but the computation is lowered for {', '.join(platforms)}: "
            "expected an NVIDIA GPU of compute capability 8.0 or newer with jax-triton installed, or "
            "TRITON_INTERPRET=1 in the environment before Python starts. implementation=None chooses "
            "what can run.")
    takes = can and implementation != "xla"
    if takes and "cuda" in platforms:
        check_cuda()
    return takes


# Up to so many scores, over batch and heads, launching kernels takes longer than XLA's fused loops and few products do,
# and the scores are small change. "Small shapes" in benchmarks/NOTES.md has the times.
FEW_SCORES = 2**20


def _has_few_scores(operands: dict[str, jax.core.ShapedArray]) -> bool:
    (T, N, _), S = operands["query"].shape[-3:], operands["key"].shape[-3]
    scores = math.prod(_batch_shape(operands)) * N * T * S
    return isinstance(scores, int) and scores <= FEW_SCORES  # Sizes of a program to export may be symbols.


def _lower(ctx: mlir.LoweringRuleContext, *args, spec: AttentionSpec, operands: tuple[str, ...], **params):
    few = spec.implementation is None and _has_few_scores(dict(zip(operands, ctx.avals_in, strict=True)))
    rule = _with_kernels if not few and takes_kernels(ctx, spec.implementation) else _with_reference
    return _lower_rule(ctx, rule, *args, spec=spec, operands=operands, **params)


def _lower_rule(ctx: mlir.LoweringRuleContext, rule, *args, **params):
    """An implementation as part of the program: it sees plain arrays, those of one device under a `jax.shard_map`."""
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
    plain = ctx.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
    mesh, communicates = partition.mesh_to_divide(ctx.module_context, is_opaque=rule is _with_kernels)
    function = rule if mesh is None else functools.partial(partition.divided, rule, outputs, mesh, communicates)
    with partition.plain_arrays():
        results = mlir.lower_fun(function, multiple_results=True)(plain, *args, **params)
    return [lower_with_sharding_in_types(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]


def _abstract(*avals, operands, wanted, **params):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    with partition.plain_arrays():
        outputs = jax.eval_shape(
            functools.partial(_with_reference, operands=operands, wanted=wanted, **params), *shapes)
    by_name = dict(zip(operands, avals, strict=True))
    mesh = by_name["query"].sharding.mesh
    if mesh.empty:
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in outputs]
    specs = partition.explicit(by_name, dict(zip(wanted, outputs, strict=True)))
    varies = ManualAxisType(varying=varying(*avals))
    return [jax.core.ShapedArray(x.shape, x.dtype, sharding=NamedSharding(mesh, spec), manual_axis_type=varies)
            for x, spec in zip(outputs, specs, strict=True)]


def varying(*avals) -> frozenset[str]:
    """The axes of a `jax.shard_map` over which one of the types varies."""
    return frozenset().union(*(x.manual_axis_type.varying for x in avals))


def _batch(arrays, axes, **params):
    # A numpy array that vmap was given comes here as it is, and must not become a constant of a jaxpr.
    arrays = [jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(jnp.asarray(x), axis, 0)
              for x, axis in zip(arrays, axes, strict=True)]
    outputs = _pass_p.bind(*arrays, **params)
    return outputs, [0] * len(outputs)


_pass_p = Primitive("attention_pass")
_pass_p.multiple_results = True
_pass_p.def_impl(functools.partial(xla.apply_primitive, _pass_p))
_pass_p.def_abstract_eval(_abstract)
# The shards of a pass are chosen with the mesh at hand.
dispatch.prim_requires_devices_during_lowering.add(_pass_p)
mlir.register_lowering(_pass_p, _lower)
mlir.register_lowering(_pass_p, _lower, platform="cuda")
batching.primitive_batchers[_pass_p] = _batch
