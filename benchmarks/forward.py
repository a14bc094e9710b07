"""The forward of attention: one line a length and implementation.

    python -m benchmarks.forward --b 2 --h 4 --t 2048 --d 128 --dtype fp16 --iters 50
    python -m benchmarks.forward --t 1024,4096 --mode triton --no-compile
    python -m benchmarks.forward --t 128 --device cpu                      # math alone

    math     jax.nn.dot_product_attention(..., implementation="xla"), the attention that stores its scores
    triton   jttt.dot_product_attention(..., implementation="triton")
    cudnn    jax.nn.dot_product_attention(..., implementation="cudnn"), where it runs

Medians over --repeats batches of --iters launches that go out back to back, and after ± half the distance
between the quartiles. With --no-compile each operation is a launch of its own, as outside of jax.jit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax

from benchmarks import harness, workload
from benchmarks.harness import Measurement, Record
from benchmarks.workload import Case

# By what they are called here; names of `workload.IMPLEMENTATIONS`.
MODES = {"math": ["xla"], "triton": ["triton"], "both": ["xla", "triton", "cudnn"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for, and prints and saves it."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    flags, device = harness.parse(parser, argv)
    implementations = workload.runnable(MODES[flags.mode], harness.DTYPES[flags.dtype], device)
    if not implementations:
        parser.error(f"argument --mode: {flags.mode} does not run on {device}")
    report = harness.describe_run("benchmarks.forward", argv, device) | {"results": []}
    tasks = [
        harness.Task("results", f"T={case.t} {name}", functools.partial(measure_cell, case, name, flags))
        for case in workload.cases(flags, flags.causal) for name in implementations
    ]
    out = flags.out or harness.default_out("forward", device)
    harness.run(tasks, report, out, device)
    for row in report["results"]:
        length = f" at {row['shape']['t']}" if len(flags.t) > 1 else ""
        if row["failure"]:
            print(f"{row['label']} forward{length}: {row['failure']}")
        else:
            print(f"{row['label']} forward{length}: {row['milliseconds']:.3f} ms ± {row['spread'] / 2:.3f}")
    if out:
        print(f"saved {out}")


def measure_cell(case: Case, implementation: str, flags: argparse.Namespace) -> list[Record]:
    """The row of one implementation on one problem."""
    attention = workload.attention_of(implementation, case)
    timing = dict(iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats)

    def measure() -> Measurement:
        input_sets = workload.rotating_inputs(case, flags.seed)
        if flags.compile:
            return harness.measure(attention, input_sets, **timing)
        jax.block_until_ready(attention(*input_sets[0]))
        return harness.summary(harness.time_launches(attention, input_sets, **timing))

    label = "math" if implementation in ("xla", "plain") else implementation
    names = {"label": label, "implementation": implementation, "pass": "forward", "compiled": flags.compile}
    return [names | case.describe() | dataclasses.asdict(harness.attempt(measure))]


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    problem = harness.add_problem_flags(parser, h=4, t=(2048,), d=128, dtype="fp16")
    problem.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True,
        help="whether a query sees only keys up to its own position (default --causal)")
    measured = parser.add_argument_group("measured")
    measured.add_argument("--mode", choices=MODES, default="both",
                          help="math, triton, or both and cudnn beside them (default both)")
    measured.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="one jitted program, or operation by operation (default --compile)")
    harness.add_run_flags(parser)
    return parser


if __name__ == "__main__":
    main()
