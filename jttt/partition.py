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
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import SPMDAxisContext
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

# The mesh axes along each axis of each operand.
Given = dict[str, list[MeshAxes]]

# An implementation of a pass, as `passes.py` calls it.
Rule = Callable[..., list[jax.Array]]


class PartitioningWarning(UserWarning):
    """Attention under jit gathers an operand, because it is sharded along an axis that cannot be divided."""


class Axes:
    """The labels of the axes of a pass's operands and results, and which of them may be divided."""

    def __init__(self, operands: dict[str, Any], results: dict[str, Any]):
        self.batch = len(operands["query"].shape) - 3
        self.heads, self.key_heads = operands["query"].shape[-2], operands["key"].shape[-2]
        self.sizes: dict[Label, int] = {}
        for array, x in operands.items():
            for label, size in zip(self._all(array), x.shape, strict=True):
                self.sizes[label] = max(size, self.sizes.get(label, 1))
        self.operands = {array: self.of(array, x.shape) for array, x in operands.items()}
        self.results = {array: self.of(array, x.shape) for array, x in results.items()}

    def _all(self, array: str) -> Labels:
        letters = _AXES[kind(array)]
        return (*range(self.batch), *(letters.replace("K", "N") if self.heads == self.key_heads else letters))

    def of(self, array: str, shape: Sequence[int]) -> Labels:
        return tuple(label if size == self.sizes[label] else None
                     for label, size in zip(self._all(array), shape, strict=True))

    def divisible(self, communicates: bool) -> set[Label]:
        """What shards may have parts of; if they cannot communicate, only what needs no sum and no shifted rule."""
        labels = {*range(self.batch), "T", "N", "K"}
        if not communicates:
            for its in self.results.values():
                labels &= {*its, "N", "K"} if "K" in its else {*its, "K"}
            labels -= {"T"}
        return labels


@dataclasses.dataclass(frozen=True)
class Division:
    """Which mesh axes divide which axis; `heads_share_key` where a shard has some query heads of one key head."""

    mesh: Mesh
    by_label: dict[Label, MeshAxes]
    heads_share_key: bool

    @classmethod
    def choose(cls, mesh: Mesh, axes: Axes, given: Given, communicates: bool) -> Division:
        divisible = axes.divisible(communicates)
        chosen = _agreed(axes, given, lambda label, over: (
            label in divisible and set(over) <= set(mesh.axis_names) and axes.sizes[label] % _count(mesh, over) == 0))
        heads = chosen.pop("N", None) or chosen.get("K")
        chosen.pop("K", None)
        if heads is None:
            return cls(mesh, chosen, False)
        # Query heads go with their key head: a shard has whole groups, or a part of one.
        shards, group = _count(mesh, heads), axes.heads // axes.key_heads
        if axes.key_heads % shards == 0:
            return cls(mesh, chosen | dict(N=heads, K=heads), False)
        if communicates and group % (axes.heads // shards) == 0:
            return cls(mesh, chosen | dict(N=heads), True)
        return cls(mesh, chosen, False)

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


def automatic(function: Callable[..., dict[str, jax.Array]], results_like: dict[str, jax.Array]
              ) -> Callable[..., dict[str, jax.Array]]:
    """The function, with all shardings inside left to the compiler; its results are sharded as arrays of their names.

    Explicit types would ask plain formulas how each of their products is sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return function
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding={
        array: NamedSharding(mesh, jax.typeof(x).sharding.spec) for array, x in results_like.items()})


def mesh_to_divide(context: Any, is_opaque: bool) -> tuple[Mesh | None, bool]:
    """The devices over which the compiler may divide what is lowered in `context`, and whether they can communicate.

    None inside a `jax.shard_map` over all axes that divide anything, where each device has its part already; where no
    sharding names the axes of a mesh; and in a program for export, which could not call back here. The operands of
    what `is_opaque` to the compiler are then gathered. Under a `jax.shard_map` over some axes the others are divided,
    but collectives would not know the numbers of their devices.
    """
    devices = context.axis_context
    if isinstance(devices, SPMDAxisContext):
        manual = [name in devices.manual_axes for name in devices.mesh.axis_names]
        names = [name for name, is_manual in zip(devices.mesh.axis_names, manual, strict=True) if not is_manual]
        rest = devices.mesh.devices[tuple(0 if is_manual else slice(None) for is_manual in manual)]
        mesh = Mesh(rest, names) if names and rest.size > 1 else None
        communicates = False
    elif devices.num_devices == 1:
        return None, False
    else:
        shape = devices.abstract_mesh
        mesh = None if shape is None else Mesh(
            np.array(devices.device_assignment).reshape(shape.axis_sizes), shape.axis_names)
        communicates = True
    if mesh is not None and context.lowering_parameters.for_export:
        if is_opaque:
            warnings.warn("attention gathers what is sharded, since a program for export cannot ask how to divide it. "
                          "Inside jax.shard_map each device has its part.", PartitioningWarning, stacklevel=2)
        return None, False
    return mesh, communicates


def divided(rule: Rule, outputs: Sequence[Any], mesh: Mesh, communicates: bool, *arrays: jax.Array,
            spec: AttentionSpec, operands: tuple[str, ...], wanted: tuple[str, ...], **params) -> list[jax.Array]:
    """`rule(*arrays, spec=…, …)`, the pass, by shards that are chosen once the compiler has spread the shardings.

    `outputs` have the shapes and dtypes of what it returns.
    """
    axes = Axes(dict(zip(operands, arrays, strict=True)), dict(zip(wanted, outputs, strict=True)))

    def whole(*arrays):
        return rule(*arrays, spec=spec, operands=operands, wanted=wanted, **params)

    def partition(_mesh, arguments: Sequence[Any], _results):
        given = {array: _mesh_axes(x, mesh) for array, x in zip(operands, arguments, strict=True)}
        division = Division.choose(mesh, axes, given, communicates)
        _warn(division, axes, given)

        def shard(*arrays):
            with plain_arrays():
                results = _run_shard(rule, division, axes, dict(zip(operands, arrays, strict=True)), spec, **params)
            return [results[array].astype(output.dtype) for array, output in zip(wanted, outputs, strict=True)]

        return (mesh, shard, [division.sharding(its) for its in axes.results.values()],
                tuple(division.sharding(its) for its in axes.operands.values()))

    function = custom_partitioning(whole)
    function.def_partition(partition, decode_shardings=False, sharding_rule=_propagation(axes))
    return function(*arrays)


def _run_shard(rule: Rule, division: Division, axes: Axes, operands: dict[str, jax.Array], spec: AttentionSpec,
               **params) -> dict[str, jax.Array]:
    """The results of one shard, by name, sums over shards being complete."""
    sums = {array: division.summed(its) for array, its in axes.results.items()}
    spec = dataclasses.replace(spec, partial=spec.partial or any(sums.values()))
    if division.shards("T") > 1:
        operands, spec = _at_own_queries(operands, spec, division, axes.sizes)
    if division.heads_share_key:
        head = division.index("N") * axes.key_heads // division.shards("N")
        operands = {array: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=-2) if kind(array) in ("key", "value") else x
                    for array, x in operands.items()}
    results = rule(*operands.values(), spec=spec, operands=tuple(operands), wanted=tuple(sums), **params)
    results = dict(zip(sums, results, strict=True))
    for array, over in sums.items():
        if division.heads_share_key and kind(array) in ("key", "value"):
            is_own = jnp.arange(axes.key_heads)[:, None] == head
            results[array] = jnp.where(is_own, results[array], 0)
        if over:
            results[array] = jax.lax.psum(results[array], over)
    return results


def _count(mesh: Mesh, names: MeshAxes) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _propagation(axes: Axes) -> SdyShardingRule:
    """Along which axes the compiler may spread a sharding: those with the same label."""
    alone = itertools.count()

    def factor(label: Label) -> str:
        return label if isinstance(label, str) else f"one{next(alone)}" if label is None else f"batch{label}"

    operands, results = (tuple(ArrayMapping(*map(factor, its)) for its in group.values())
                         for group in (axes.operands, axes.results))
    return SdyShardingRule(operands, results)


def _mesh_axes(argument: Any, mesh: Mesh) -> list[MeshAxes]:
    """The mesh axes along each axis of an array; by a name that the mesh lacks where it is a part of one."""
    sharding = argument.sharding._to_xla_hlo_sharding(argument.ndim)
    if sharding.is_replicated():
        return [()] * argument.ndim
    tiles = np.empty(mesh.size, int)
    tiles[sharding.tile_assignment_devices()] = np.arange(mesh.size)
    # For each axis of the array, the index of every device's tile, laid out as the mesh.
    indices = np.unravel_index(tiles.reshape(mesh.devices.shape), sharding.tile_assignment_dimensions())
    return [_names_of(index, mesh) for index in indices[:argument.ndim]]


def _names_of(index: np.ndarray, mesh: Mesh) -> MeshAxes:
    """The mesh axes, slowest first, of which `index` is the row-major index."""
    steps = {name: np.diff(index, axis=i).max(initial=0) for i, name in enumerate(mesh.axis_names)}
    names = sorted((name for name, step in steps.items() if step > 0), key=lambda name: -steps[name])
    coordinates = dict(zip(mesh.axis_names, np.indices(index.shape), strict=True))
    expected = np.zeros_like(index)
    for name in names:
        expected = expected * mesh.shape[name] + coordinates[name]
    if np.array_equal(index, expected):
        return tuple(names)
    return tuple(f"a part of {name}" for i, name in enumerate(mesh.axis_names) if np.ptp(index, axis=i).any())


def _names(partitions: PartitionSpec, ndim: int) -> list[MeshAxes]:
    names = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in partitions]
    return names + [()] * (ndim - len(names))


def _warn(division: Division, axes: Axes, given: Given) -> None:
    """Says which operands are gathered, and why."""
    gathered = []
    for array, its in axes.operands.items():
        for label, names in zip(its, given[array], strict=True):
            lost = [name for name in names if name not in division.by_label.get(label, ())]
            if lost and (isinstance(label, int) or label in _WORDS):
                along = "batch" if isinstance(label, int) else _WORDS[label]
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


def explicit(operands: dict[str, Any], results: dict[str, Any]) -> list[PartitionSpec]:
    """How results are sharded where shardings are part of the types: as that which they are the gradient or tangent
    of; output and log-sum-exp as query."""
    axes = Axes(operands, results)
    given = {array: _names(x.sharding.spec, x.ndim) for array, x in operands.items()}
    chosen = _agreed(axes, given, lambda label, over: True)
    divisible = axes.divisible(communicates=True)
    specs = []
    for array, its in axes.results.items():
        if kind(array) in given:
            own = zip(its, axes.operands[kind(array)], given[kind(array)], strict=True)
            over_each = [over if label == same else chosen.get(label) for label, same, over in own]
        else:
            over_each = [chosen.get(label) if label in divisible else None for label in its]
        specs.append(PartitionSpec(*(over or None for over in over_each)))
    return specs


def _agreed(axes: Axes, given: Given, fits: Callable[[Label, MeshAxes], bool]) -> dict[Label, MeshAxes]:
    """The mesh axes along each label: query's where it is sharded along it, else those of the first that is."""
    chosen: dict[Label, MeshAxes] = {}
    for array in sorted(axes.operands, key=lambda array: array != "query"):
        for label, over in zip(axes.operands[array], given[array], strict=True):
            taken = {name for names in chosen.values() for name in names}
            if over and label is not None and label not in chosen and not taken & set(over) and fits(label, over):
                chosen[label] = over
    return chosen
