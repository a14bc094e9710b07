"""Every attention that is installed here, side by side in one run: to second order, where it goes that far.

    python -m benchmarks.compare                                   # on a GPU
    python -m benchmarks.compare --t 4096 --h 8 --d 64 --dtype fp16
    python -m benchmarks.compare --t 64 --device cpu               # what a CPU can run

    jttt         jttt.dot_product_attention, Triton kernels
    xla          jax.nn.dot_product_attention(..., implementation="xla")
    cudnn        jax.nn.dot_product_attention(..., implementation="cudnn")
    tokamax      tokamax.dot_product_attention
    torch-math   PyTorch's scaled_dot_product_attention, the backend that stores its scores
    torch-flash  the same, FlashAttention's kernels

The passes are the forward, the gradient and the meta-gradient of benchmarks.gradgrad. What is not installed,
or cannot run here, is named and skipped; a pass that a peer lacks has the reason in its row, and the run goes
on. JAX's passes are one jitted program each, PyTorch's are eager. Temporary memory is XLA's count of what a
program sets aside, and for PyTorch the peak of what it allocated beyond inputs and outputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

from benchmarks import harness, workload
from benchmarks.harness import Record
from benchmarks.peers import Peer, peers
from benchmarks.workload import Case


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for, saves it after every cell, and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    # JAX would take most of the GPU's memory for itself, and PyTorch needs its own.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags, device = harness.parse(build_parser(), argv)
    report = harness.describe_run("benchmarks.compare", argv, device) | {"skipped": {}, "results": []}
    present = []
    for peer in peers():
        reason = peer.absent(device)
        if reason:
            print(f"{peer.name}: skipped, {reason}")
            report["skipped"][peer.name] = reason
        else:
            present.append(peer)
    out = flags.out or harness.default_out("compare", device)
    tasks = [
        harness.Task("results", f"T={case.t} {pass_name} {peer.name}",
                     functools.partial(measure_cell, case, pass_name, peer, flags))
        for case in workload.cases(flags, flags.causal) for pass_name in workload.PASSES for peer in present
    ]
    harness.run(tasks, report, out, device)
    print(f"\n{report['device']}, {report['date']}\n{report['command']}\n\n{table(report['results'])}")
    if out:
        print(f"\nsaved {out}")


def measure_cell(case: Case, pass_name: str, peer: Peer, flags: argparse.Namespace) -> list[Record]:
    """The row of one pass of one peer on one problem."""
    measured = harness.attempt(lambda: peer.measure(case, pass_name, flags))
    tflops = None
    if measured.milliseconds:
        tflops = workload.operations(pass_name, case) / measured.milliseconds / 1e9
    names = {"implementation": peer.name, "what": peer.what, "pass": pass_name}
    return [names | case.describe() | dataclasses.asdict(measured) | {"tflops": tflops}]


def table(results: Sequence[Record]) -> str:
    """Time, rate and memory of each cell."""
    header = ("T", "pass", "peer", "ms", "spread", "TFLOP/s", "temporary")
    rows = []
    for row in results:
        if row["failure"]:
            rows.append((str(row["shape"]["t"]), row["pass"], row["implementation"], row["failure"][:48], "", "", ""))
        else:
            rows.append((str(row["shape"]["t"]), row["pass"], row["implementation"], f"{row['milliseconds']:.3f}",
                         f"{row['spread']:.3f}", f"{row['tflops']:.4g}",
                         harness.format_bytes(row["temporary_bytes"])))
    return harness.format_table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    problem = harness.add_problem_flags(parser, h=16, t=(1024, 4096, 8192), d=128, dtype="bf16")
    problem.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True,
        help="whether a query sees only keys up to its own position (default --causal)")
    harness.add_run_flags(parser)
    return parser


if __name__ == "__main__":
    main()
