"""From a pass on named arrays to kernel launches.

A kernel's parameters are its contract: arrays by the names of `jttt.reference`, the lengths T and
S, outputs, and the constexpr configuration C. So launching is the same for all of them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

# Triton 3.9 warns where this is unset; fused multiply-adds are what these kernels are written for.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import jax_triton
import triton

from jttt import masks, parts
from jttt.kernels import backward, blocks, cost, double_backward, forward, hopper, interpreter
from jttt.kernels.config import ArrayLayouts, Blocks, KernelConfig, Layout
from jttt.spec import PER_POSITION, AttentionSpec, Band, kind

# {pass: [(kernel, what one program has a block of, its outputs)]}
KERNELS: dict[str, list[tuple[Any, str, tuple[str, ...]]]] = {
    "forward": [(forward.forward_kernel, "queries", ("output", "lse", "lse_tail"))],
    "backward": [(backward.d_query_kernel, "queries", ("d_query",)),
                 (backward.d_key_value_kernel, "keys", ("d_key", "d_value")),
                 (backward.d_bias_kernel, "bias", ("d_bias",))],
    "tangent": [(double_backward.tangent_kernel, "queries", ("t_output", "t_lse", "row_term"))],
    "double_backward": [(double_backward.g_query_kernel, "queries", ("g_query",)),
                        (double_backward.g_key_value_kernel, "keys", ("g_key", "g_value")),
                        (double_backward.g_bias_kernel, "bias", ("g_bias",))],
}

_PER_ROW = ("lse", "lse_tail", "delta", "row_term")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, ready to run. Outputs are the parameters that `arguments` lacks; `results` are what is
    made of them, which is the same unless several programs share the work of a block."""

    kernel: Any
    arguments: dict[str, Any]
    outputs: dict[str, jax.ShapeDtypeStruct]
    results: dict[str, jax.ShapeDtypeStruct]
    axis: str
    batch: int
    capability: int

    @property
    def config(self) -> KernelConfig:
        return self.arguments["C"]

    @property
    def tiles(self) -> int:
        """The most tiles that a program of one of the two loop orders visits, for one head."""
        cut, band = self.config.blocks, self.config.band
        own, other, length = ((cut.queries, cut.keys, self.arguments["S"]) if self.axis == "queries" else
                              (cut.keys, cut.queries, self.arguments["T"]))
        if band.left is not None and band.right is not None:
            length = min(length, max(own + band.left + band.right, 0))
        return triton.cdiv(length, other)

    @property
    def pipelined_stages(self) -> int:
        """Depth of the compiler's own pipeline; zero where the kernel queues its loads and products itself."""
        return 0 if hopper.is_hopper(self.kernel) else self.config.blocks.stages

    @property
    def at_once(self) -> int:
        """Programs that run at once. A Hopper kernel's program of eight warps has a multiprocessor for itself."""
        whole = hopper.is_hopper(self.kernel) and self.config.blocks.warps == 8
        return blocks.AT_ONCE // 2 if whole else blocks.AT_ONCE

    @property
    def options(self) -> dict[str, int]:
        """What else the compiler is told."""
        most = self.config.blocks.most_registers
        return {} if most is None else {"maxnreg": most}

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, self.config.shares

    @property
    def programs(self) -> int:
        """One for each block of the axis that is divided, each of its heads, each of the batch."""
        cut, layout = self.config.blocks, self.config.layout
        query_blocks = triton.cdiv(self.arguments["T"], cut.queries)
        key_blocks = triton.cdiv(self.arguments["S"], cut.keys)
        if self.axis == "queries":
            return query_blocks * layout.query.heads * self.batch
        if self.axis == "keys":
            return key_blocks * layout.key.heads * self.batch
        tiles = (query_blocks if layout.bias.rows else 1) * (key_blocks if layout.bias.columns else 1)
        return tiles * layout.bias.heads * (self.batch // self.config.bias_batch)


def run(name: str, spec: AttentionSpec, operands: dict[str, jax.Array], wanted: Sequence[str],
        batch: tuple[int, ...], capability: int) -> dict[str, jax.Array]:
    """Runs the kernels of pass `name` that the wanted outputs need; returns these by name."""
    results = {}
    for launch in launches(name, spec, operands, wanted, batch, capability):
        if interpreter.has(launch.kernel):
            made = interpreter.run(launch.kernel, launch.grid, launch.arguments, launch.outputs)
        else:
            made = call(launch)
        if launch.config.shares > 1:
            made = {array: x.astype(launch.results[array].dtype) for array, x in parts.put_together(made).items()}
        results |= made
    return results


def launches(name: str, spec: AttentionSpec, operands: dict[str, Any], wanted: Sequence[str],
             batch: tuple[int, ...], capability: int, cut: Blocks | None = None) -> Iterator[Launch]:
    """The launches of pass `name`, with the table's blocks unless others are given.

    Operands need only a shape and a dtype, unless blocks are hidden at run time.
    """
    query, value, bias = operands["query"], operands["value"], operands.get("bias")
    (T, _, H), (S, _, E) = query.shape[-3:], value.shape[-3:]
    hidden = {array: operands.get(array) for array in masks.OPERANDS}

    for kernel, axis, outputs in KERNELS[name]:
        results = {array: _result(array, spec, operands, batch) for array in outputs if array in wanted}
        if not results:
            continue
        if not interpreter.has(kernel) and hopper.takes(capability, query, value):
            kernel, _ = hopper.KERNELS.get(kernel.__name__, (kernel, ()))
        dense = axis != "bias" and any(x is not None for x in (bias, hidden["mask"], hidden["query_segments"]))
        blocks_ = cut or blocks.choose(kernel.__name__, max(H, E), query.dtype.itemsize, capability, dense)
        arrays = {array: operands.get(array) for array in kernel.arg_names if array not in (*results, "T", "S", "C")}
        at_run_time = any(x is not None for x in hidden.values())
        if at_run_time or (axis == "bias" and spec.band != Band()):
            status = masks.tile_status(spec.band, hidden, T, S, blocks_.queries, blocks_.keys)
            if axis == "bias":
                arrays["tile_status"] = status.reshape((1,) * (len(batch) + 3 - status.ndim) + status.shape)
            else:
                heads = operands["key"].shape[-2]
                arrays["block_list"], arrays["block_counts"] = (
                    masks.key_blocks(status) if axis == "queries" else masks.query_blocks(status, heads))
        layouts = {array: _layout(array, x.shape, batch) for array, x in (arrays | results).items() if x is not None}
        shared = batch[-1] if bias is not None and bias.shape[-4] < batch[-1] else 1
        config = KernelConfig(spec.scale, spec.band, spec.soft_cap, spec.precision, blocks_,
                              ArrayLayouts(**layouts), shared)
        launch = Launch(kernel, {**arrays, "T": T, "S": S, "C": config}, results, results, axis, math.prod(batch),
                        capability)
        # A bias would need the tail of log-sum-exps put together too, and a sink belongs to one share only.
        alone = axis == "bias" or bias is not None or operands.get("sinks") is not None
        yield launch if alone else _shared(launch)


def _result(array: str, spec: AttentionSpec, operands: dict[str, Any], batch: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    query, value = operands["query"], operands["value"]
    (T, N, H), (S, K, E) = query.shape[-3:], value.shape[-3:]
    rows = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, E), "output": (T, N, E)}
    like = kind(array)
    if like == "bias":
        bias = operands["bias"]
        return jax.ShapeDtypeStruct((*batch[:-1], *bias.shape[-4:]), np.float32 if spec.partial else bias.dtype)
    if like in rows:
        return jax.ShapeDtypeStruct(batch + rows[like], np.float32 if spec.partial else query.dtype)
    return jax.ShapeDtypeStruct((*batch, N, T), np.float32)


def _shared(launch: Launch) -> Launch:
    """The launch with the work of each block shared by several programs, if it has too few to fill a GPU."""
    config = launch.config
    shares = blocks.shares(launch.programs, launch.tiles, not config.band.slanted, launch.at_once)
    if shares == 1:
        return launch
    layout = dataclasses.replace(config.layout, **{
        array: dataclasses.replace(getattr(config.layout, array), share_stride=launch.batch)
        for array in launch.results})
    outputs = {array: jax.ShapeDtypeStruct((shares, *x.shape), np.float32) for array, x in launch.results.items()}
    arguments = launch.arguments | {"C": dataclasses.replace(config, layout=layout, shares=shares)}
    return dataclasses.replace(launch, arguments=arguments, outputs=outputs)


def _layout(array: str, shape: tuple[int, ...], batch: tuple[int, ...]) -> Layout:
    like, own_batch = kind(array), _batch_axes(shape, batch)
    if like in ("bias", "mask"):
        heads, rows, columns = shape[-3:]
        return Layout(heads, rows=rows > 1, columns=columns > 1, batch=own_batch)
    if like == "block_list":
        return Layout(shape[-4], shape[-1], batch=own_batch)
    if like in ("block_counts", "tile_status"):
        return Layout(shape[-3], batch=own_batch)
    if like in PER_POSITION:
        return Layout(1, batch=own_batch)
    if like == "sinks":
        return Layout(shape[-1], batch=own_batch)
    if like in _PER_ROW:
        return Layout(shape[-2], batch=own_batch)
    return Layout(*shape[-2:], batch=own_batch)


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
    """Runs a kernel where the computation is lowered for CUDA; returns its outputs by name."""
    cut, name = launch.config.blocks, launch.kernel.__name__.replace("_hopper", "_kernel")
    arrays = {array: x for array, x in launch.arguments.items() if hasattr(x, "dtype")} | launch.outputs
    results = jax_triton.triton_call(
        **hopper.described(launch.kernel, launch.arguments), kernel=launch.kernel,
        out_type=tuple(launch.outputs.values()), grid=launch.grid, name=f"jttt_{name}", num_warps=cut.warps,
        num_stages=launch.pipelined_stages, compute_capability=launch.capability, backend_options=launch.options,
        cost_estimate=cost.estimate(name, arrays, launch.config.band, cut, launch.batch))
    return dict(zip(launch.outputs, results, strict=True))
