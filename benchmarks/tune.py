"""Times block sizes of one kernel after another on this GPU, to write `jttt/kernels/blocks.py` by.

    python -m benchmarks.tune                                     # every kernel at widths 64 and 128
    python -m benchmarks.tune --kernels d_query_kernel --d 128 --dtype bf16 --out tune.json

Candidates are compiled side by side in worker processes; those that spill more than --spill bytes a
thread or ask for more shared memory than a program can have are named and not run. The rest are
timed one at a time on random data, median of the repeats, and the table is sorted by time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import harness
from jttt.kernels import launch
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


def candidates(problem: Problem) -> list[Blocks]:
    """Tiles, warps and stages worth compiling: no more rows than warps can share, no tile too small."""
    sizes = (32, 64, 128) if problem.width <= 128 else (16, 32, 64)
    rows = "keys" if "key_value" in problem.kernel else "queries"
    # The kernels of order two stream more tiles, so fewer stages of them fit.
    depths = (2, 3) if PRODUCTS[problem.kernel] < 5 else (1, 2)
    found = []
    for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), depths):
        cut = Blocks(queries, keys, warps, stages)
        if getattr(cut, rows) >= (64 if problem.width <= 128 else 16):
            found.append(cut)
    return found


def compile_candidate(problem: Problem, cut: Blocks) -> tuple[Blocks, int, int, int, bytes | None]:
    """(blocks, registers, spilled, shared, exported program or None where it cannot run)."""
    from benchmarks import resources

    planned = problem.launch(cut)
    try:
        registers, spilled, shared = resources.compile_resources(planned)
    except Exception as error:  # a candidate that the compiler refuses is a result too
        print(f"{problem.kernel} {cut}: {str(error).splitlines()[0]}")
        return cut, 0, 0, 0, None
    if shared > resources.SHARED_MEMORY[90]:
        return cut, registers, spilled, shared, None
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in planned.arguments.items()
              if hasattr(x, "dtype")}
    rest = {name: x for name, x in planned.arguments.items() if name not in shapes}

    def program(*arrays):
        return launch.call(dataclasses.replace(planned, arguments=dict(zip(shapes, arrays, strict=True)) | rest))

    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    exported = jax.export.export(jax.jit(program), platforms=["cuda"], disabled_checks=checks)(*shapes.values())
    return cut, registers, spilled, shared, bytes(exported.serialize())


def milliseconds(program: Any, arrays: list[jax.Array], repeats: int, launches: int) -> float:
    """Median time of one launch, of back-to-back launches between two synchronisations."""
    run = jax.jit(jax.export.deserialize(program).call)
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(launches):
            result = run(*arrays)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / launches * 1e3)
    return statistics.median(times)


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
    parser.add_argument("--kernels", default=",".join(PRODUCTS), help="comma-separated (default: all)")
    parser.add_argument("--d", default="64,128", help="widths of a head (default: 64,128)")
    parser.add_argument("--dtype", choices=harness.DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--b", type=int, default=1, help="batch (default: 1)")
    parser.add_argument("--h", type=int, default=16, help="heads (default: 16)")
    parser.add_argument("--t", type=int, default=8192, help="length (default: 8192)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--spill", type=int, default=200, help="most spilled bytes to time (default: 200)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    parser.add_argument("--keep", type=int, default=12, help="rows to print for each kernel (default: 12)")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()

    capability = int(jax.devices("cuda")[0].compute_capability.replace(".", ""))
    problems = [Problem(kernel, int(width), harness.DTYPES[arguments.dtype], arguments.b, arguments.h, arguments.t,
                        arguments.causal, capability)
                for width in arguments.d.split(",") for kernel in arguments.kernels.split(",")]
    rows: list[dict[str, Any]] = []
    # Workers compile for the GPU but must not touch it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        jobs = {problem: [pool.submit(compile_candidate, problem, cut) for cut in candidates(problem)]
                for problem in problems}
        for problem in problems:
            progress = tqdm(jobs[problem], desc=f"{problem.kernel} {problem.width}")
            rows += tune(problem, [job.result() for job in progress], arguments.spill, arguments.keep)
    if arguments.out:
        device = jax.devices("cuda")[0]
        report = harness.describe_run("benchmarks.tune", sys.argv[1:], device)
        harness.save_json(Path(arguments.out), {**report, "results": rows})


def tune(problem: Problem, compiled: list[Any], spill: int, keep: int) -> list[dict[str, Any]]:
    """Times what can run, prints the fastest, and returns a row for every candidate."""
    arrays = inputs(problem)
    operations = (2 * PRODUCTS[problem.kernel] * problem.batch * problem.heads * problem.length**2 * problem.width
                  / (2 if problem.causal else 1))
    rows = []
    for cut, registers, spilled, shared, program in compiled:
        row = dict(kernel=problem.kernel, width=problem.width, dtype=problem.dtype, **dataclasses.asdict(cut),
                   registers=registers, spilled=spilled, shared=shared, milliseconds=None)
        if program is not None and spilled <= spill:
            row["milliseconds"] = milliseconds(program, arrays, repeats=5, launches=4)
            row["tflops"] = operations / row["milliseconds"] / 1e9
        rows.append(row)
    timed = sorted((x for x in rows if x["milliseconds"]), key=lambda x: x["milliseconds"])
    for x in timed[:keep]:
        print(f"{x['kernel']:20} {x['width']:4} {x['queries']:4}×{x['keys']:<4} warps {x['warps']} "
              f"stages {x['stages']} {x['milliseconds']:8.3f} ms {x['tflops']:6.0f} TFLOP/s  "
              f"{x['registers']} registers, {x['spilled']} spilled, {x['shared']} shared", flush=True)
    return rows


if __name__ == "__main__":
    main()
