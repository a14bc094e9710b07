"""The forward, the gradient and the meta-gradient of attention: time, memory and errors.

    python -m benchmarks.gradgrad                                          # on a GPU
    python -m benchmarks.gradgrad --t 65536 --implementations triton       # one long sequence
    python -m benchmarks.gradgrad --t 2048 --bwd_mode all                  # beside the other backwards
    python -m benchmarks.gradgrad --t 128 --h 2 --d 64 --iters 2           # a try-out on a CPU

With attention(q, k, v) of standard normal inputs, the three passes are

    forward         attention(q, k, v)
    gradient        g = grad(mean(attention)) with respect to q, k, v
    meta-gradient   grad(mean(g_q²) + mean(g_k²) + mean(g_v²)) with respect to q, k, v

each under one jit, with all of its outputs returned. Implementations, side by side in one run:

    triton   jttt.dot_product_attention(..., implementation="triton")
    xla      jax.nn.dot_product_attention(..., implementation="xla")

and, with --bwd_mode, the other backwards of jttt.modes, by their names, in the place of triton
(which is the mode flash).

The first table has medians over --repeats batches of --iters launches, the distance between
the quartiles (a smaller difference is noise), TFLOP/s by the operations that the algorithm
needs, XLA's temporary memory, and the time of a first call. The second has the error of each
output against float64, relative in Frobenius norm, at T of at most 1024, beside xla's.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence

import jttt.modes
from benchmarks import accuracy, harness, workload
from benchmarks.harness import Record
from benchmarks.workload import Case


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for, saves it after every cell, and prints the tables."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    flags, device = harness.parse(parser, argv)
    modes = map(workload.implementation_of, flags.bwd_mode)
    asked = [*(modes if "triton" in flags.implementations else ()),
             *(name for name in flags.implementations if name != "triton")]
    implementations = workload.runnable(asked, harness.DTYPES[flags.dtype], device)
    if not implementations:
        parser.error(f"argument --implementations: none of those asked for runs on {device}")

    report = harness.describe_run("benchmarks.gradgrad", argv, device)
    report |= {"results": [], "errors": []}
    out = flags.out or harness.default_out("gradgrad", device)
    harness.run(list_tasks(flags, implementations), report, out, device)
    print_report(report)
    if out:
        print(f"\nsaved {out}")


def list_tasks(flags: argparse.Namespace, implementations: list[str]) -> list[harness.Task]:
    """Every cell of the run, implementations side by side, and then the comparisons."""
    cases = workload.cases(flags, flags.causal)
    tasks = [
        harness.Task(
            "results",
            f"T={case.t} {pass_name} {name}",
            functools.partial(measure_cell, case, pass_name, name, flags),
        )
        for case in cases
        for pass_name in workload.PASSES
        for name in implementations
    ]
    if flags.errors:
        # Long problems reduce to the same one; a dictionary keeps their order.
        tasks += [
            harness.Task(
                "errors",
                f"T={case.t} errors",
                functools.partial(accuracy.errors, case, implementations, flags.seed),
            )
            for case in dict.fromkeys(map(accuracy.reduced, cases))
        ]
    return tasks


def measure_cell(
    case: Case, pass_name: str, implementation: str, flags: argparse.Namespace
) -> list[Record]:
    """The row of one pass of one implementation on one problem."""
    measured = harness.attempt(lambda: harness.measure(
        workload.PASSES[pass_name](workload.attention_of(implementation, case)),
        workload.rotating_inputs(case, flags.seed),
        iters=flags.iters,
        warmup=flags.warmup,
        repeats=flags.repeats,
    ))
    tflops = None
    if measured.milliseconds:
        tflops = workload.operations(pass_name, case) / measured.milliseconds / 1e9
    names = {"implementation": implementation, "pass": pass_name}
    return [names | case.describe() | dataclasses.asdict(measured) | {"tflops": tflops}]


def print_report(report: Record) -> None:
    """Prints a report, as it is saved, for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"\n{report['device']}, {report['date']}\n{versions}\n{report['command']}\n")
    print(results_table(report["results"]))
    if report["errors"]:
        lengths = sorted({row["shape"]["t"] for row in report["errors"]})
        print(f"\nrelative error against float64, at T = {', '.join(map(str, lengths))}")
        print(errors_table(report["errors"]))


def results_table(results: list[Record]) -> str:
    """Time, rate and memory of each cell, and how much faster than xla it is."""
    xla = {
        (row["shape"]["t"], row["pass"]): row["milliseconds"]
        for row in results
        if row["implementation"] == "xla"
    }
    header = ("T", "pass", "implementation", "ms", "spread", "speed-up", "TFLOP/s",
              "temporary", "first call")
    rows = []
    for row in results:
        length, pass_name = row["shape"]["t"], row["pass"]
        time, xla_time = row["milliseconds"], xla.get((length, pass_name))
        rows.append((
            str(length),
            pass_name,
            row["implementation"],
            row["failure"] or f"{time:.3f}",
            harness.format_number(row["spread"], ".3f"),
            f"{xla_time / time:.2f}x" if time and xla_time else "",
            harness.format_number(row["tflops"], ".4g"),
            harness.format_bytes(row["temporary_bytes"]),
            harness.format_number(row["first_call_seconds"], ".1f", " s"),
        ))
    return harness.format_table(header, rows)


def errors_table(errors: list[Record]) -> str:
    """The error of each output, and its ratio to the error of xla."""
    header = ("T", "pass", "output", "implementation", "error", "this / xla")
    rows = [
        (
            str(row["shape"]["t"]),
            row["pass"],
            row["output"],
            row["implementation"],
            f"{row['error']:.2e}",
            harness.format_number(row["ratio_to_xla"], ".2f"),
        )
        for row in errors
    ]
    return harness.format_table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradgrad",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    problem = harness.add_problem_flags(parser, h=16, t=(1024, 4096, 8192), d=128, dtype="bf16")
    problem.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True,
        help="whether a query sees only keys up to its own position (default --causal)",
    )
    measured = parser.add_argument_group("measured")
    measured.add_argument(
        "--implementations", type=harness.one_of("triton", "xla"), default=["triton", "xla"],
        metavar="NAME,...", help="which to run: triton, xla or both (default triton,xla)",
    )
    measured.add_argument(
        "--bwd_mode", type=harness.one_of(*jttt.modes.BWD_MODES), default=["flash"], metavar="MODE,...",
        help=f"which backwards of triton: {', '.join(jttt.modes.BWD_MODES)}, or all (default flash)",
    )
    measured.add_argument(
        "--errors", action=argparse.BooleanOptionalAction, default=True,
        help="whether to compare with float64 too (default --errors)",
    )
    harness.add_run_flags(parser)
    return parser


if __name__ == "__main__":
    main()
