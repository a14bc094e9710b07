"""What each kernel takes of a GPU, compiled without one.

    python -m benchmarks.resources                       # every row of the table of blocks
    python -m benchmarks.resources --capability 90 --kernel forward_kernel --json

Prints, for each kernel and row of `jttt/kernels/blocks.py`, the registers and spilled bytes of a
thread, as ptxas reports them, and the shared memory of a program.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks import harness
from jttt.kernels import blocks, launch
from jttt.kernels.config import Blocks
from jttt.spec import AttentionSpec, Band

# Shared memory that one program can have, in bytes. (8.6 and 8.9 have 101,376; the float32
# rows of order two at width 256 alone need more.)
SHARED_MEMORY = {80: 166_912, 90: 232_448}

_DTYPES = {2: jnp.bfloat16, 4: jnp.float32}
_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int8": "i8", "bool": "i1"}

ROWS = ("query", "key", "value", "output", "d_output", "t_query", "t_key", "t_value")
COLUMNS = ("lse", "delta", "t_lse", "row_term")


@dataclasses.dataclass(frozen=True)
class Resources:
    """One compiled kernel: registers and spilled bytes of a thread, shared bytes of a program."""

    kernel: str
    capability: int
    width: int
    dtype: str
    blocks: Blocks
    registers: int
    spilled: int
    shared: int

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_MEMORY[self.capability]


def launch_of(kernel: str, width: int, dtype: Any, capability: int, *, causal: bool = True, every: bool = False,
              batch: int = 1, heads: int = 4, length: int = 512, cut: Blocks | None = None) -> launch.Launch:
    """The launch of one kernel at a head width, with the whole direction and every output.

    With `every`, also with all that can be given at once: bias, sinks, soft cap, a window and each
    kind of mask. Blocks are the table's unless others are given.
    """
    name = next(name for name, entries in launch.KERNELS.items()
                if any(entry[0].__name__ == kernel for entry in entries))
    T, S, N = length, length, heads
    shapes = {array: (batch, length, heads, width) for array in ROWS} | {array: (batch, N, T) for array in COLUMNS}
    dtypes = dict.fromkeys(ROWS, dtype) | dict.fromkeys(COLUMNS, jnp.float32)
    if every or "bias" in kernel:
        shapes |= dict.fromkeys(("bias", "t_bias"), (1, 1, T, S)) | {"lse_tail": (batch, N, T)}
        dtypes |= dict.fromkeys(("bias", "t_bias", "lse_tail"), jnp.float32)
    if every:
        shapes |= {"sinks": (1, N), "t_sinks": (1, N), "mask": (1, 1, T, S), "mask_summary": (1, 1, T // 16, S // 16)}
        shapes |= dict.fromkeys(("key_start", "key_end", "query_segments"), (1, T)) | {"key_segments": (1, S)}
        dtypes |= {"sinks": jnp.float32, "t_sinks": jnp.float32, "mask": jnp.bool_, "mask_summary": jnp.int8}
        dtypes |= dict.fromkeys(("key_start", "key_end", "query_segments", "key_segments"), jnp.int32)
    spec = AttentionSpec(scale=width**-0.5, band=Band(256 if every else None, 0 if causal else None),
                         soft_cap=30.0 if every else None)
    wanted = [output for entry in launch.KERNELS[name] if entry[0].__name__ == kernel for output in entry[2]
              if every or output != "lse_tail"]
    planned = []

    def plan(operands):
        planned.extend(launch.launches(name, spec, operands, wanted, (batch,), capability, cut))

    jax.eval_shape(plan, {array: jax.ShapeDtypeStruct(shapes[array], dtypes[array]) for array in shapes})
    return planned[0]


def compile_resources(planned: launch.Launch) -> tuple[int, int, int]:
    """Compiles a launch for its capability: (registers, spilled, shared)."""
    cut = planned.config.blocks
    return compile_kernel(planned.kernel, planned.arguments, planned.outputs, planned.capability,
                          dict(num_warps=cut.warps, num_stages=cut.stages))


def compile_kernel(kernel: Any, arguments: dict[str, Any], outputs: dict[str, Any], capability: int,
                   options: dict[str, int]) -> tuple[int, int, int]:
    """Compiles a kernel for arrays of these shapes and dtypes: (registers, spilled, shared)."""
    signature, constants = {}, {}
    for name in kernel.arg_names:
        argument = outputs.get(name, arguments.get(name))
        if name == "C" or argument is None:
            signature[name], constants[name] = "constexpr", argument
        elif isinstance(argument, int):
            signature[name] = "i32"
        else:
            signature[name] = "*" + _TRITON_TYPES[jnp.dtype(argument.dtype).name]
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return *_ptxas(compiled.asm["ptx"], capability), compiled.metadata.shared


def measure(kernel: str, width: int, itemsize: int, capability: int) -> Resources:
    """Compiles one row of the table."""
    dtype = _DTYPES[itemsize]
    planned = launch_of(kernel, width, dtype, capability)
    return Resources(kernel, capability, width, jnp.dtype(dtype).name, planned.config.blocks,
                     *compile_resources(planned))


def _ptxas(ptx: str, capability: int) -> tuple[int, int]:
    target = re.search(r"\.target\s+(sm_\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return registers, int(re.search(r"(\d+) bytes spill stores", report).group(1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=sorted(blocks.TABLE), help="only this one")
    parser.add_argument("--kernel", help="only this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = [(kernel, width, itemsize, capability)
            for capability, table in blocks.TABLE.items() for kernel, width, itemsize in table
            if arguments.capability in (None, capability) and arguments.kernel in (None, kernel)]
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        results = list(pool.map(measure, *zip(*rows, strict=True)))
    if arguments.json:
        json.dump([dataclasses.asdict(x) for x in results], sys.stdout)
        return
    header = ["kernel", "sm", "width", "dtype", "T×S", "warps", "stages", "registers", "spilled", "shared", ""]
    print(harness.format_table(header, [
        [x.kernel, str(x.capability), str(x.width), x.dtype, f"{x.blocks.queries}×{x.blocks.keys}",
         str(x.blocks.warps), str(x.blocks.stages), str(x.registers), str(x.spilled), str(x.shared),
         "" if x.fits else "does not fit"] for x in results]))


if __name__ == "__main__":
    main()
