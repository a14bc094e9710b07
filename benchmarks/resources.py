"""What each kernel takes of a GPU, compiled without one.

    python -m benchmarks.resources                       # every row of the table of blocks
    python -m benchmarks.resources --capability 90 --kernel forward_kernel --json
    python -m benchmarks.resources --write               # after a change of kernels

Prints, for each kernel and row of `jttt/kernels/blocks.py`, the registers and spilled bytes of a
thread, as ptxas reports them, and the shared memory of a program; --write puts the spilled bytes
into the table.
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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
from jax_triton import triton_lib
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon import _runtime as gluon

from benchmarks import harness
from jttt.kernels import blocks, hopper, launch
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
              batch: int = 1, heads: int = 16, length: int = 4096, cut: Blocks | None = None) -> launch.Launch:
    """The launch of one kernel at a head width, with the whole direction and every output.

    With `every`, also with all that can be given at once: bias, sinks, soft cap, a window and each
    kind of mask. Blocks are the table's unless others are given. It is the very kernel that is named,
    also where its version for Hopper, or the other way about, would run. The default problem is one that
    fills a GPU: no two programs share the work of a block.
    """
    cut = cut or blocks.choose(kernel, width, jnp.dtype(dtype).itemsize, capability, dense=every)
    name, (plain, _, outputs) = next((name, entry) for name, entries in launch.KERNELS.items() for entry in entries
                                     if entry[0].__name__ == kernel.replace("_hopper", "_kernel"))
    named = plain if plain.__name__ == kernel else hopper.KERNELS[plain.__name__][0]
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
    wanted = [output for output in outputs if every or output != "lse_tail"]
    planned = []

    def plan(operands):
        planned.extend(launch.launches(name, spec, operands, wanted, (batch,), capability, cut))

    jax.eval_shape(plan, {array: jax.ShapeDtypeStruct(shapes[array], dtypes[array]) for array in shapes})
    return dataclasses.replace(planned[0], kernel=named)


def compile_resources(planned: launch.Launch) -> tuple[int, int, int]:
    """Compiles a launch for its capability: (registers, spilled, shared)."""
    arguments = dict(planned.arguments)

    def describe(arrays):
        arguments.update(hopper.described(planned.kernel, arguments | arrays))

    jax.eval_shape(describe, {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arguments.items()
                              if hasattr(x, "dtype")})
    return compile_kernel(planned.kernel, arguments, planned.outputs, planned.capability,
                          dict(num_warps=planned.config.blocks.warps, num_stages=planned.pipelined_stages)
                          | planned.options)


def compile_kernel(kernel: Any, arguments: dict[str, Any], outputs: dict[str, Any], capability: int,
                   options: dict[str, int]) -> tuple[int, int, int]:
    """Compiles a kernel for arrays of these shapes and dtypes: (registers, spilled, shared).

    As jax-triton does, whose order of the compiler's passes is not that of `triton.compile` for a kernel in Gluon.
    """
    signature, constants = {}, {}
    for name in kernel.arg_names:
        argument = outputs.get(name, arguments.get(name))
        if name == "C" or argument is None:
            signature[name], constants[name] = "constexpr", argument
        elif isinstance(argument, jax_triton.TensorDescriptor):
            signature[name] = triton_lib.get_type_id(argument)
        elif isinstance(argument, int):
            signature[name] = "i32"
        else:
            signature[name] = "*" + _TRITON_TYPES[jnp.dtype(argument.dtype).name]
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind.startswith(("*", "tensordesc"))}
    in_gluon = isinstance(kernel, gluon.GluonJITFunction)
    source = (gluon.GluonASTSource if in_gluon else ASTSource)(kernel, signature, constants, aligned)

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, functions, modules, context)
    compiled = triton_lib.compile_ttir_inplace(module, backend, parsed, target)
    return *_ptxas(compiled.binary, capability), compiled.shared_mem_bytes


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


def write(rows: dict[tuple[int, str, int, int], Blocks], path: Path = Path(blocks.__file__)) -> None:
    """Puts rows (capability, kernel, width, bytes of a number) into the file of the table, each in its own place."""
    lines, capability = [], 0
    for line in path.read_text().splitlines(keepends=True):
        if table := re.fullmatch(r"    (\d+): {\n", line):
            capability = int(table[1])
        if row := re.match(r' {8}\("(\w+)", (\d+), (\d+)\): ', line):
            cut = rows.get((capability, row[1], int(row[2]), int(row[3])))
            if cut:
                numbers = [str(cut.queries), str(cut.keys), str(cut.warps), str(cut.stages)]
                numbers += [f"spilled={cut.spilled}"] if cut.spilled else []
                numbers += [f"most_registers={cut.most_registers}"] if cut.most_registers else []
                line = f"{row[0]}Blocks({', '.join(numbers)}),\n"
        lines.append(line)
    harness.save_text(path, "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=sorted(blocks.TABLE), help="only this one")
    parser.add_argument("--kernel", help="only this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", action="store_true", help="put what each row spills into the table of blocks")
    arguments = parser.parse_args()
    rows = [(kernel, width, itemsize, capability)
            for capability, table in blocks.TABLE.items() for kernel, width, itemsize in table
            if arguments.capability in (None, capability) and arguments.kernel in (None, kernel)]
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        results = list(pool.map(measure, *zip(*rows, strict=True)))
    if arguments.write:
        write({(capability, kernel, width, itemsize): dataclasses.replace(x.blocks, spilled=x.spilled)
               for (kernel, width, itemsize, capability), x in zip(rows, results, strict=True)})
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
