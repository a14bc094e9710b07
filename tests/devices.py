"""Eight simulated devices, and what a compiled program sends between them."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# The axes of the arguments of `jttt.dot_product_attention`.
_AXES = {
    "query": "BTNH", "key": "BSKH", "value": "BSKE", "bias": "BNTS", "mask": "BNTS", "sinks": "N",
    "query_seq_lengths": "B", "key_value_seq_lengths": "B", "query_offset": "B", "key_start": "BT", "key_end": "BT",
    "query_segment_ids": "BT", "key_value_segment_ids": "BS",
}


def mesh(axis_type: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of the first CPU devices with axes of these names and sizes."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes),
                         devices=jax.devices("cpu")[:np.prod([*axes.values()])])


def put(arguments: Mapping[str, Any], on: Mesh, **letters: Any) -> dict[str, Any]:
    """The arguments on the devices of a mesh; each letter of an axis is given the mesh axes that divide it."""

    def placed(name: str, x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        axes = _AXES[name][-x.ndim:] if x.ndim else ""
        spec = [letters.get(letter) if size > 1 else None for letter, size in zip(axes, x.shape, strict=True)]
        return jax.device_put(x, NamedSharding(on, PartitionSpec(*spec)))

    return {name: placed(name, x) for name, x in arguments.items()}


def compiled(function: Callable, *arguments: Any) -> tuple[Any, dict[str, int]]:
    """What `jit(function)` makes of the arguments, and how many collectives of each kind it runs for that."""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), collectives(program.as_text())


def collectives(program: str) -> dict[str, int]:
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    return dict(collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", program)))
