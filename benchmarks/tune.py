"""Times block sizes of one kernel after another on this GPU; the fastest make up `jttt/kernels/blocks.py`.

    python -m benchmarks.tune                                     # every kernel at widths 64 and 128
    python -m benchmarks.tune --write                             # and put the fastest into the table
    python -m benchmarks.tune --kernels d_query_kernel --d 128 --dtype bf16 --out tune.json

The kernels are those that run on this GPU, forward_hopper and so on where they are for it, unless others are
named. Candidates are compiled side by side in worker processes; those that spill more than --spill bytes a
thread or ask for more shared memory than a program can have are not run. The rest are timed one at a time on
random data, median of the repeats, the fastest four of them three times more, in turn, since a GPU's clock drifts;
and printed by time. What computes something else than the kernel in plain Triton is named and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import compiling, harness
from jttt import parts
from jttt.kernels import blocks, hopper, launch
from jttt.kernels.config import Blocks

# Products of T·S·width operations that each kernel makes.
PRODUCTS = {"forward_kernel": 2, "d_query_kernel": 3, "d_key_value_kernel": 4, "tangent_kernel": 5,
            "g_query_kernel": 7, "g_key_value_kernel": 8}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is timed on."""

    kernel: str
    width: int
    dtype: str
    batch: int
    heads: int
    length: int
    causal: bool
    capability: int

    def launch(self, cut: Blocks) -> launch.Launch:
        from benchmarks import resources

        return resources.launch_of(self.kernel, self.width, jnp.dtype(self.dtype), self.capability,
                                   causal=self.causal, batch=self.batch, heads=self.heads, length=self.length, cut=cut)


def kernels_for(width: int, dtype: str, capability: int) -> list[str]:
    """The kernels that run problems of such a width and dtype."""
    array = jax.ShapeDtypeStruct((1, 1, 1, width), dtype)
    if hopper.takes(capability, array, array):
        return [hopper.KERNELS[name][0].__name__ for name in PRODUCTS]
    return list(PRODUCTS)


def products(kernel: str) -> int:
    return PRODUCTS[kernel.replace("_hopper", "_kernel")]


def candidates(problem: Problem) -> list[Blocks]:
    """Tiles, warps and stages worth compiling."""
    if problem.kernel.endswith("_hopper"):
        return _hopper_candidates(problem)
    sizes = (32, 64, 128) if problem.width <= 128 else (16, 32, 64)
    rows = "keys" if "key_value" in problem.kernel else "queries"
    # The kernels of order two stream more tiles, so fewer stages of them fit.
    depths = (2, 3) if products(problem.kernel) < 5 else (1, 2)
    found = []
    for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), depths):
        cut = Blocks(queries, keys, warps, stages)
        # No more warps than the rows that stay can feed.
        if getattr(cut, rows) >= (64 if problem.width <= 128 else 16):
            found.append(cut)
    return found


def _hopper_candidates(problem: Problem) -> list[Blocks]:
    """Sixteen of the rows that stay to each warp, as Hopper's products have them; stages are buffers. With 168
    registers three programs share a multiprocessor, if its shared memory has room for them."""
    found = []
    for (resident, warps), streamed, stages in itertools.product(((64, 4), (128, 8)), (32, 64, 128), (1, 2, 3)):
        queries, keys = (streamed, resident) if "key_value" in problem.kernel else (resident, streamed)
        found.append(Blocks(queries, keys, warps, stages))
        if warps == 4 and stages < 3 and streamed < 128:
            found.append(dataclasses.replace(found[-1], most_registers=168))
    return found


def plain(problem: Problem) -> tuple[Problem, Blocks]:
    """The kernel in plain Triton with the table's blocks: what others must agree with."""
    kernel = problem.kernel.replace("_hopper", "_kernel")
    itemsize = jnp.dtype(problem.dtype).itemsize
    return (dataclasses.replace(problem, kernel=kernel),
            blocks.choose(kernel, problem.width, itemsize, problem.capability))


def compile_candidate(problem: Problem, cut: Blocks) -> tuple[Blocks, int, int, int, bytes | None]:
    """(blocks, registers, spilled, shared, exported program or None where it cannot run)."""
    from benchmarks import resources

    planned = problem.launch(cut)
    try:
        registers, spilled, shared = resources.compile_resources(planned)
    except Exception as error:  # a candidate that the compiler refuses is a result too
        print(f"{problem.kernel} {cut}: {str(error).splitlines()[0]}")
        return cut, 0, 0, 0, None
    if shared > max(bytes_ for known, bytes_ in resources.SHARED_MEMORY.items() if known <= problem.capability):
        return cut, registers, spilled, shared, None
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in planned.arguments.items()
              if hasattr(x, "dtype")}
    rest = {name: x for name, x in planned.arguments.items() if name not in shapes}

    def program(*arrays):
        made = launch.call(dataclasses.replace(planned, arguments=dict(zip(shapes, arrays, strict=True)) | rest))
        return parts.put_together(made) if planned.config.shares > 1 else made

    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    exported = jax.export.export(jax.jit(program), platforms=["cuda"], disabled_checks=checks)(*shapes.values())
    return cut, registers, spilled, shared, bytes(exported.serialize())


def milliseconds(run: Callable, arrays: list[jax.Array]) -> float:
    """Median time of one launch, of back-to-back launches between two synchronisations."""
    return statistics.median(harness.time_launches(run, [tuple(arrays)], iters=4, warmup=1, repeats=5))


def loaded(program: bytes) -> Callable:
    """What `compile_candidate` exported, as a function of arrays."""
    return jax.jit(jax.export.deserialize(program).call)


def agree(results: dict[str, jax.Array], expected: dict[str, jax.Array]) -> bool:
    """Whether two cuts of a kernel compute the same, up to rounding in another order."""

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    return all(jnp.linalg.norm(wide(results[name]) - wide(x)) <= 0.02 * jnp.linalg.norm(wide(x))
               for name, x in expected.items())


def inputs(problem: Problem) -> list[jax.Array]:
    planned = problem.launch(candidates(problem)[0])
    generator = np.random.default_rng(0)
    shapes = {name: x for name, x in planned.arguments.items() if hasattr(x, "dtype")}
    # A log-sum-exp of this size keeps the probabilities near those of real rows.
    return [jnp.asarray(generator.standard_normal(x.shape, np.float32) + (8 if name == "lse" else 0), x.dtype)
            for name, x in shapes.items()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", help="comma-separated (default: all that run on this GPU)")
    parser.add_argument("--d", default="64,128", help="widths of a head (default: 64,128)")
    parser.add_argument("--dtype", choices=harness.DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--b", type=int, default=1, help="batch (default: 1)")
    parser.add_argument("--h", type=int, default=16, help="heads (default: 16)")
    parser.add_argument("--t", type=int, default=8192, help="length (default: 8192)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--spill", type=int, default=200, help="most spilled bytes to time (default: 200)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    parser.add_argument("--keep", type=int, default=12, help="rows to print for each kernel (default: 12)")
    parser.add_argument("--write", action="store_true", help="put the fastest blocks into jttt/kernels/blocks.py")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        parser.error(f"kernels are timed on an NVIDIA GPU, and this is {jax.devices()[0]}")
    capability = int(device.compute_capability.replace(".", ""))
    if arguments.write and capability not in blocks.TABLE:
        parser.error(f"argument --write: the table has no rows of compute capability {capability}; "
                     f"expected a GPU of {' or '.join(map(str, blocks.TABLE))}")
    dtype = harness.DTYPES[arguments.dtype]
    problems = [Problem(kernel, width, dtype, arguments.b, arguments.h, arguments.t, arguments.causal, capability)
                for width in map(int, arguments.d.split(","))
                for kernel in (arguments.kernels.split(",") if arguments.kernels
                               else kernels_for(width, dtype, capability))]
    rows: list[dict[str, Any]] = []
    with compiling.worker_processes(arguments.workers, capability) as pool:
        jobs = {problem: [pool.submit(compile_candidate, *plain(problem)),
                          *(pool.submit(compile_candidate, problem, cut) for cut in candidates(problem))]
                for problem in problems}
        for problem in problems:
            progress = tqdm(jobs[problem], desc=f"{problem.kernel} {problem.width}")
            (*_, expected), *compiled = [job.result() for job in progress]
            rows += tune(problem, expected, compiled, arguments.spill, arguments.keep)
    if arguments.write:
        write(rows, capability)
    if arguments.out:
        report = harness.describe_run("benchmarks.tune", sys.argv[1:], device)
        harness.save_json(Path(arguments.out), {**report, "results": rows})


def tune(problem: Problem, expected: bytes, compiled: list[Any], spill: int, keep: int) -> list[dict[str, Any]]:
    """Times what can run and agrees with the program `expected`, prints the fastest; a row for every candidate."""
    arrays = inputs(problem)
    right = loaded(expected)(*arrays)
    operations = (2 * products(problem.kernel) * problem.batch * problem.heads * problem.length**2 * problem.width
                  / (2 if problem.causal else 1))
    rows, runs = [], {}
    for cut, registers, spilled, shared, program in compiled:
        row = dict(kernel=problem.kernel, width=problem.width, dtype=problem.dtype) | dataclasses.asdict(cut)
        row |= dict(registers=registers, spilled=spilled, shared=shared, milliseconds=None, looks=0)
        if program is not None and spilled <= spill:
            try:
                run = loaded(program)
                if agree(run(*arrays), right):
                    row["milliseconds"], row["looks"], runs[len(rows)] = milliseconds(run, arrays), 1, run
                else:
                    print(f"{problem.kernel} {cut}: its results are not those of the kernel in plain Triton")
            except jax.errors.JaxRuntimeError as error:
                print(f"{problem.kernel} {cut}: {harness.reason(error)}")
        rows.append(row)
    finalists = sorted(runs, key=lambda i: rows[i]["milliseconds"])[:4]
    again = [[milliseconds(runs[i], arrays) for i in finalists] for _ in range(3)]
    for i, *times in zip(finalists, *again, strict=True):
        rows[i].update(milliseconds=statistics.median(times), looks=1 + len(times))
    timed = sorted((rows[i] for i in runs), key=rank)
    for x in timed:
        x["tflops"] = operations / x["milliseconds"] / 1e9
    for x in timed[:keep]:
        print(f"{x['kernel']:20} {x['width']:4} {x['queries']:4}×{x['keys']:<4} warps {x['warps']} "
              f"stages {x['stages']} {x['milliseconds']:8.3f} ms {x['tflops']:6.0f} TFLOP/s  "
              f"{x['registers']} registers{' at most' if x['most_registers'] else ''}, {x['spilled']} spilled, "
              f"{x['shared']} shared", flush=True)
    return rows


def rank(row: dict[str, Any]) -> tuple[int, float]:
    """The fastest first, but those that were looked at again before the rest: a clock may have drifted in between."""
    return -row["looks"], row["milliseconds"]


def write(rows: list[dict[str, Any]], capability: int, path: Path = Path(blocks.__file__)) -> None:
    """Puts the fastest of the rows of each kernel and width into the table."""
    from benchmarks import resources

    best: dict[tuple[int, str, int, int], dict[str, Any]] = {}
    for row in sorted((x for x in rows if x["milliseconds"]), key=rank):
        best.setdefault((capability, row["kernel"], row["width"], jnp.dtype(row["dtype"]).itemsize), row)
    cuts = {}
    for key, row in best.items():
        cut = Blocks(row["queries"], row["keys"], row["warps"], row["stages"], most_registers=row["most_registers"])
        # What it spills on the problem on which a test looks at that.
        planned = resources.launch_of(row["kernel"], row["width"], jnp.dtype(row["dtype"]), capability, cut=cut)
        cuts[key] = dataclasses.replace(cut, spilled=resources.compile_resources(planned)[1])
    resources.write(cuts, path)


if __name__ == "__main__":
    main()
