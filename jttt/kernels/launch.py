"""From a pass on named arrays to kernel launches.

A kernel's parameters are its contract: arrays by the names of `jttt.reference`, the lengths T and
S, outputs, and the constexpr configuration C. So launching is the same for all of them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

# Triton 3.9 warns where this is unset; fused multiply-adds are what these kernels are written for.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import jax_triton  # noqa: E402
import triton  # noqa: E402

from jttt.kernels import backward, blocks, double_backward, forward  # noqa: E402
from jttt.kernels.config import ArrayLayouts, Blocks, KernelConfig, Layout  # noqa: E402
from jttt.spec import AttentionSpec  # noqa: E402

# {pass: [(kernel, which axis its programs divide, its outputs)]}
KERNELS: dict[str, list[tuple[Any, str, tuple[str, ...]]]] = {
    "forward": [(forward.forward_kernel, "queries", ("output", "lse"))],
    "backward": [(backward.d_query_kernel, "queries", ("d_query",)),
                 (backward.d_key_value_kernel, "keys", ("d_key", "d_value"))],
    "tangent": [(double_backward.tangent_kernel, "queries", ("t_output", "t_lse", "row_term"))],
    "double_backward": [(double_backward.g_query_kernel, "queries", ("g_query",)),
                        (double_backward.g_key_value_kernel, "keys", ("g_key", "g_value"))],
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, ready to run. Outputs are the parameters that `arguments` lacks."""

    kernel: Any
    arguments: dict[str, Any]
    outputs: dict[str, jax.ShapeDtypeStruct]
    axis: Literal["queries", "keys"]
    batch: int
    capability: int

    @property
    def config(self) -> KernelConfig:
        return self.arguments["C"]

    @property
    def programs(self) -> int:
        """One for each block of the axis that is divided, each of its heads, each of the batch."""
        cut, layout = self.config.blocks, self.config.layout
        if self.axis == "queries":
            return triton.cdiv(self.arguments["T"], cut.queries) * layout.query.heads * self.batch
        return triton.cdiv(self.arguments["S"], cut.keys) * layout.key.heads * self.batch

    def with_blocks(self, cut: Blocks) -> Launch:
        config = dataclasses.replace(self.config, blocks=cut)
        return dataclasses.replace(self, arguments={**self.arguments, "C": config})


def run(name: str, spec: AttentionSpec, operands: dict[str, jax.Array], wanted: Sequence[str],
        batch: tuple[int, ...], capability: int) -> dict[str, jax.Array]:
    """Runs the kernels of pass `name` that the wanted outputs need; returns these by name."""
    results = {}
    for launch in launches(name, spec, operands, wanted, batch, capability):
        interpreted = not isinstance(launch.kernel, triton.JITFunction)
        results |= _interpret(launch) if interpreted else call(launch)
    return results


def launches(name: str, spec: AttentionSpec, operands: dict[str, Any], wanted: Sequence[str],
             batch: tuple[int, ...], capability: int) -> list[Launch]:
    """The launches of pass `name`. Operands need only a shape and a dtype."""
    query, key, value = operands["query"], operands["key"], operands["value"]
    (T, N, H), (S, K, E) = query.shape[-3:], value.shape[-3:]
    rows = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, E), "output": (T, N, E)}

    def kind(array: str) -> str:
        return array.removeprefix("d_").removeprefix("t_").removeprefix("g_")

    def shape_of(array: str) -> tuple[int, ...]:
        return rows.get(kind(array), (N, T))

    def layout_of(array: str, operand: Any = None) -> Layout:
        heads, width = shape_of(array)[1:] if kind(array) in rows else (N, 1)
        return Layout(heads, width, None if operand is None else _batch_axes(operand.shape, batch))

    result = []
    for kernel, axis, outputs in KERNELS[name]:
        made = {array: jax.ShapeDtypeStruct(batch + shape_of(array),
                                            query.dtype if kind(array) in rows else np.float32)
                for array in outputs if array in wanted}
        if not made:
            continue
        cut = blocks.choose(kernel.__name__, max(H, E), query.dtype.itemsize, capability)
        layouts = {array: layout_of(array) for array in ("output", "lse", *made)}
        layouts |= {array: layout_of(array, x) for array, x in operands.items()}
        config = KernelConfig(spec.scale, spec.band, spec.precision, cut, ArrayLayouts(**layouts))
        arguments = {array: operands.get(array) for array in kernel.arg_names if array not in made}
        arguments |= dict(T=T, S=S, C=config)
        result.append(Launch(kernel, arguments, made, axis, math.prod(batch), capability))
    return result


def _batch_axes(shape: tuple[int, ...], batch: tuple[int, ...]) -> tuple[tuple[int, int, int], ...] | None:
    """`Layout.batch` of an operand whose leading axes are those of `batch` or of size one."""
    own = shape[:len(batch)]
    if own == batch:
        return None
    axes, divisor, stride = [], 1, 1
    for size, full in zip(reversed(own), reversed(batch), strict=True):
        if size == full and full > 1:
            axes.append((divisor, size, stride))
            stride *= size
        divisor *= full
    return tuple(axes)


def call(launch: Launch) -> dict[str, jax.Array]:
    cut = launch.config.blocks
    results = jax_triton.triton_call(
        **launch.arguments, kernel=launch.kernel, out_type=tuple(launch.outputs.values()),
        grid=(launch.programs,), name=f"jttt_{launch.kernel.__name__}", num_warps=cut.warps,
        num_stages=cut.stages, compute_capability=launch.capability)
    return dict(zip(launch.outputs, results, strict=True))


# The interpreter replaces functions of `triton.language` while it runs.
_interpreter_lock = threading.Lock()


def _interpret(launch: Launch) -> dict[str, jax.Array]:
    """Runs a kernel on the host, through Triton's interpreter, inside a jitted computation."""
    arrays = {name: x for name, x in launch.arguments.items() if hasattr(x, "dtype")}
    others = {name: x for name, x in launch.arguments.items() if name not in arrays}

    def on_host(*operands):
        made = [np.full(x.shape, np.nan, x.dtype) for x in launch.outputs.values()]
        inputs = [np.ascontiguousarray(x) for x in operands]
        tensors = {name: _HostTensor(x) for name, x in
                   zip([*arrays, *launch.outputs], [*inputs, *made], strict=True)}
        with _interpreter_lock:
            launch.kernel[(launch.programs,)](**tensors, **others)
        return tuple(made)

    results = jax.pure_callback(on_host, tuple(launch.outputs.values()), *arrays.values())
    return dict(zip(launch.outputs, results, strict=True))


class _HostTensor:
    """A numpy array that looks enough like a torch tensor for Triton's interpreter."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = {"float16": "fp16", "float32": "fp32", "int32": "i32", "bool": "i1"}[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _HostTensor:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def cpu(self) -> _HostTensor:
        return self

    def copy_(self, other: _HostTensor) -> None:
        pass

    def new_empty(self, size: int, device: str) -> _HostTensor:
        return _HostTensor(self.array)

    def set_(self, *storage) -> None:
        pass
