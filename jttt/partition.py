"""How a pass is divided over devices when its operands are sharded under jit.

Every axis of every operand is known by the operand's name, so one table tells what may go to different devices. Batch,
heads and queries are divided, and each shard runs the pass on what it holds:

    batch, heads    nothing is communicated; a key head goes where its query heads are
    queries         each shard shifts the rules on positions to its own; all of them have all keys and values

A gradient that is a sum over a divided axis (that of keys and values over queries, that of a bias over a batch or
heads which share it) is added up over the shards, in float32. Keys and widths are not divided: an operand that is
sharded along these is gathered, and a warning says so.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.sharding_impls import ShardingContext, parse_flatten_op_sharding
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jttt import masks
from jttt.spec import AttentionSpec, Band, kind

# The axes behind those of the batch, by the letters of `reference.py`; t and s count squares of a mask.
_AXES = {
    "query": "TNH", "key": "SKH", "value": "SKE", "output": "TNE", "bias": "NTS", "mask": "NTS", "mask_summary": "Nts",
    "lse": "NT", "lse_tail": "NT", "delta": "NT", "row_term": "NT", "sinks": "N",
    "key_start": "T", "key_end": "T", "query_segments": "T", "key_segments": "S",
}
_WORDS = {"T": "queries", "S": "keys", "N": "heads", "K": "heads", "H": "width", "E": "width"}

# An axis: a letter, the number of a batch axis, or None where an array has size one and others have more.
Label = str | int | None
Labels = tuple[Label, ...]
MeshAxes = tuple[str, ...]


class PartitioningWarning(UserWarning):
    """Attention under jit gathers an operand, because it is sharded along an axis that cannot be divided."""


class Axes:
    """The labels of the axes of a pass's operands and results, from the operands by name."""

    def __init__(self, operands: dict[str, Any]):
        self.batch = len(operands["query"].shape) - 3
        self.heads, self.key_heads = operands["query"].shape[-2], operands["key"].shape[-2]
        self.sizes: dict[Label, int] = {}
        for array, x in operands.items():
            for label, size in zip(self._all(array), x.shape, strict=True):
                self.sizes[label] = max(size, self.sizes.get(label, 1))

    def _all(self, array: str) -> Labels:
        letters = _AXES[kind(array)]
        return (*range(self.batch), *(letters.replace("K", "N") if self.heads == self.key_heads else letters))

    def of(self, array: str, shape: Sequence[int]) -> Labels:
        return tuple(label if size == self.sizes[label] else None
                     for label, size in zip(self._all(array), shape, strict=True))

    def divide(self, label: Label, shards: int) -> bool:
        """Whether the axis can be cut into that many."""
        return (isinstance(label, int) or label in ("T", "N", "K")) and self.sizes[label] % shards == 0


@dataclasses.dataclass(frozen=True)
class Division:
    """Which mesh axes divide which axis; `heads_share_key` where a shard has some query heads of one key head."""

    mesh: Mesh
    by_label: dict[Label, MeshAxes]
    heads_share_key: bool

    @classmethod
    def choose(cls, mesh: Mesh, axes: Axes, labels: Sequence[Labels], given: Sequence[Sequence[MeshAxes]]) -> Division:
        """The first operand that is sharded along an axis decides for all."""
        chosen: dict[Label, MeshAxes] = {}
        for label, over in (pair for pairs in zip(labels, given, strict=True) for pair in zip(*pairs, strict=True)):
            taken = {name for names in chosen.values() for name in names}
            if over and label not in chosen and not taken & set(over) and axes.divide(label, _count(mesh, over)):
                chosen[label] = over
        heads, key_heads = chosen.get("N"), chosen.pop("K", None)
        if axes.heads == axes.key_heads or not (heads or key_heads):
            return cls(mesh, chosen, False)
        # Query heads go with their key head: shards have whole groups, or each a part of one.
        chosen["N"] = heads or key_heads
        shards, group = _count(mesh, chosen["N"]), axes.heads // axes.key_heads
        if axes.key_heads % shards == 0:
            chosen["K"] = chosen["N"]
        elif group % (axes.heads // shards):
            del chosen["N"]
        return cls(mesh, chosen, "N" in chosen and "K" not in chosen)

    def sharding(self, labels: Labels) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(self.by_label.get(label) for label in labels)))

    def shards(self, label: Label) -> int:
        return _count(self.mesh, self.by_label.get(label, ()))

    def index(self, label: Label) -> jax.Array:
        """Which shard of an axis this one is."""
        return jax.lax.axis_index(self.by_label[label])

    def summed(self, labels: Labels) -> MeshAxes:
        """The mesh axes over which shards hold parts of a sum."""
        kept = {name for label in labels for name in self.by_label.get(label, ())}
        return tuple(dict.fromkeys(
            name for names in self.by_label.values() for name in names if name not in kept))


def plain_arrays() -> use_abstract_mesh:
    """A context in which arrays have no shardings in their types."""
    return use_abstract_mesh(AbstractMesh((), ()))


def is_possible(context: Any) -> bool:
    """Whether a program that is being lowered is divided by the compiler: not under `jax.shard_map`, where each device
    has its part already, and not in a program that is exported, which would have to call back here."""
    devices = context.axis_context
    return (isinstance(devices, ShardingContext) and devices.num_devices > 1 and devices.abstract_mesh is not None
            and not context.lowering_parameters.for_export)


def divided(rule: Callable[..., list[jax.Array]], arrays: Sequence[jax.Array], outputs: Sequence[Any], *,
            spec: AttentionSpec, operands: tuple[str, ...], wanted: tuple[str, ...], **params) -> list[jax.Array]:
    """`rule(*arrays, spec=…, …)`, the pass, by shards that are chosen once the compiler has spread the shardings.

    `outputs` have the shapes and dtypes of what it returns.
    """
    axes = Axes(dict(zip(operands, arrays, strict=True)))
    labels = [axes.of(array, x.shape) for array, x in zip(operands, arrays, strict=True)]
    made = [axes.of(array, x.shape) for array, x in zip(wanted, outputs, strict=True)]

    def whole(*arrays):
        return rule(*arrays, spec=spec, operands=operands, wanted=wanted, **params)

    def partition(mesh: Mesh, arguments: Sequence[Any], _):
        given = [_mesh_axes(x, mesh) for x in arguments]
        division = Division.choose(mesh, axes, labels, given)
        _warn(division, operands, labels, given)
        own = dataclasses.replace(spec, partial=spec.partial or any(map(division.summed, made)))

        def shard(*arrays):
            local, local_spec = dict(zip(operands, arrays, strict=True)), own
            if division.shards("T") > 1:
                local, local_spec = _at_own_queries(local, local_spec, division, axes.sizes)
            if division.heads_share_key:
                head = division.index("N") * (axes.heads // division.shards("N")) // (axes.heads // axes.key_heads)
                local |= {array: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=-2)
                          for array, x in local.items() if kind(array) in ("key", "value")}
            results = rule(*local.values(), spec=local_spec, operands=tuple(local), wanted=wanted, **params)
            if division.heads_share_key:
                results = [jnp.zeros((*x.shape[:-2], axes.key_heads, x.shape[-1]), x.dtype).at[..., head, :].set(
                    x[..., 0, :]) if kind(array) in ("key", "value") else x
                    for array, x in zip(wanted, results, strict=True)]
            results = [jax.lax.psum(x, division.summed(its)) if division.summed(its) else x
                       for x, its in zip(results, made, strict=True)]
            return [x.astype(output.dtype) for x, output in zip(results, outputs, strict=True)]

        def plain_shard(*arrays):
            with plain_arrays():
                return shard(*arrays)

        return mesh, plain_shard, [division.sharding(its) for its in made], tuple(division.sharding(its) for its in labels)

    function = custom_partitioning(whole)
    function.def_partition(partition, decode_shardings=False, sharding_rule=_propagation(labels, made))
    return function(*arrays)


def _count(mesh: Mesh, names: MeshAxes) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _propagation(labels: Sequence[Labels], made: Sequence[Labels]) -> SdyShardingRule:
    """Along which axes the compiler may spread a sharding: those with the same label."""
    alone = iter(range(sum(map(len, (*labels, *made)))))

    def factor(label: Label) -> str:
        return label if isinstance(label, str) else f"one{next(alone)}" if label is None else f"batch{label}"

    operands, results = (tuple(ArrayMapping(*map(factor, its)) for its in group) for group in (labels, made))
    return SdyShardingRule(operands, results)


def _mesh_axes(argument: Any, mesh: Mesh) -> list[MeshAxes]:
    """The mesh axes along each axis of an array; none where its sharding is not one by whole mesh axes."""
    try:
        partitions = parse_flatten_op_sharding(argument.sharding._to_xla_hlo_sharding(argument.ndim), mesh)[0]
    except (ValueError, NotImplementedError):
        partitions = PartitionSpec()
    names = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in partitions]
    return names + [()] * (argument.ndim - len(names))


def _warn(division: Division, operands: Sequence[str], labels: Sequence[Labels],
          given: Sequence[Sequence[MeshAxes]]) -> None:
    """Says which operands are gathered, and why."""
    gathered = []
    for array, its, over in zip(operands, labels, given, strict=True):
        for label, names in zip(its, over, strict=True):
            lost = [name for name in names if name not in division.by_label.get(label, ())]
            if lost and label is not None:
                along = "batch" if isinstance(label, int) else _WORDS.get(label, "tiles")
                gathered.append((label, f"{array} along its {along} (mesh axis {', '.join(lost)})"))
    if gathered:
        advice = " jttt.ring_attention takes sharded keys." if any(label == "S" for label, _ in gathered) else ""
        warnings.warn(
            f"attention gathers what is sharded otherwise than it can be divided: {'; '.join(x for _, x in gathered)}. "
            "It is divided along batch, heads and queries whose sizes are multiples of their shards." + advice,
            PartitioningWarning, stacklevel=2)


def _at_own_queries(local: dict[str, jax.Array], spec: AttentionSpec, division: Division, sizes: dict[Label, int]
                    ) -> tuple[dict[str, jax.Array], AttentionSpec]:
    """The operands and rules of a shard of queries: its place in the sequence shifts the rules on positions."""
    queries = sizes["T"] // division.shards("T")
    if "mask" in local:
        local |= dict(mask_summary=masks.summarise(local["mask"]))
    if spec.band == Band():
        return local, spec
    offset = division.index("T")[None] * queries
    start, end = masks.key_ranges(local.get("key_start"), local.get("key_end"), None, None, spec.band, offset, queries,
                                  sizes["S"])
    axes = local["query"].ndim - 2
    start, end = (x.reshape((1,) * (axes - x.ndim) + x.shape) for x in (start, end))
    return local | dict(key_start=start, key_end=end), dataclasses.replace(spec, band=Band())


def explicit(operands: dict[str, Any], wanted: Sequence[str], outputs: Sequence[Any]) -> list[PartitionSpec]:
    """How results are sharded where shardings are part of the types: as what they are the gradient or tangent of,
    and output and log-sum-exp as query."""
    axes = Axes(operands)
    chosen: dict[Label, Any] = {}
    for array, x in operands.items():
        for label, over in zip(axes.of(array, x.shape), x.sharding.spec, strict=True):
            chosen[label] = chosen.get(label) or over
    specs = []
    for array, output in zip(wanted, outputs, strict=True):
        labels = axes.of(array, output.shape)
        like = operands.get(kind(array))
        if like is None:
            specs.append(PartitionSpec(*(chosen[label] if axes.divide(label, 1) else None for label in labels)))
        else:
            specs.append(PartitionSpec(*(over if size == full else chosen.get(label) for over, size, full, label in zip(
                like.sharding.spec, like.shape, output.shape, labels, strict=True))))
    return specs
