"""The meta-gradient over sequence lengths: each backward beside plain attention, with and without a causal mask.

    python -m benchmarks.sweep --b 1 --h 1 --d 64 --dtype fp16 --ts 512,1024,2048,4096,8192,16384 \\
        --bwd_mode flash --iters 8 --warmup 2 --repeats 4 --out results.csv
    python -m benchmarks.sweep --bwd_mode all                              # every mode side by side
    python -m benchmarks.sweep --ts 64,128,256 --device cpu --iters 2      # math alone
    python -m benchmarks.sweep --draw results.csv                          # what is there, again; measures nothing

The meta-gradient is grad(mean(g_q²) + mean(g_k²) + mean(g_v²)) for g = grad(mean(attention)), as in
benchmarks.gradgrad. math is jax.nn.dot_product_attention(..., implementation="xla"); the modes are those of
jttt.modes, of which flash is jttt.dot_product_attention itself.

Everything is compiled first, by --workers processes and threads (benchmarks.compiling), then timed, one case at
a time: mean, standard deviation and median over --repeats batches of --iters launches. What runs out of memory, or
fails otherwise, has its reason in its row, and the run goes on. The CSV is written row by row; lines that begin
with # say where and how. Beside it lie two pictures, FILE-time.png and FILE-speedup.png; --draw makes them of the
rows that a killed run left. At the end stands the crossover: the length from which on a mode is faster than math.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from tqdm import tqdm

import jttt.modes
from benchmarks import compiling, harness, plots, workload
from benchmarks.harness import Measurement, Record
from benchmarks.workload import Case

FIELDS = ("causal", "t", "mode", "mean_ms", "deviation_ms", "median_ms", "temporary_bytes", "failure")
NUMBERS = {"t": int, "mean_ms": float, "deviation_ms": float, "median_ms": float, "temporary_bytes": int}


class Cell(NamedTuple):
    """One row to measure: the implementation by its name in `workload`, and what it is called here."""

    case: Case
    implementation: str
    mode: str

    def __str__(self) -> str:
        return f"T={self.case.t} {'causal' if self.case.causal else 'full'} {self.mode}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for; writes the CSV as rows come, and the pictures."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    if drawn := parser.parse_args(argv).draw:
        return draw_again(parser, drawn)
    flags, device = harness.parse(parser, argv)
    run = harness.describe_run("benchmarks.sweep", argv, device)
    run |= {"problem": f"B={flags.b} N={flags.h} K={flags.k or flags.h} H={flags.d} {harness.DTYPES[flags.dtype]}"}
    out = flags.out or harness.default_out("sweep", device, ".csv")
    cells = list_cells(flags, device)
    rows: list[Record] = []
    try:
        for row in measure(cells, flags, device):
            rows.append(row)
            if out:
                harness.save_text(out, to_csv(run, rows))
    finally:  # An interrupted run keeps the pictures of what it has.
        if out and rows:
            draw(run, rows, out)
    summarise(rows)
    if out:
        print(f"saved {out}, {picture(out, 'time')}, {picture(out, 'speedup')}")


def draw_again(parser: argparse.ArgumentParser, path: Path) -> None:
    """The pictures and the table of rows that an earlier run wrote to `path`."""
    try:
        run, rows = from_csv(path.read_text())
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"argument --draw: {error}; expected a CSV that this command wrote")
    if not rows:
        parser.error(f"argument --draw: {path} has no rows")
    draw(run, rows, path)
    summarise(rows)
    print(f"saved {picture(path, 'time')}, {picture(path, 'speedup')}")


def draw(run: Record, rows: Sequence[Record], out: Path) -> None:
    """Saves the two pictures beside the CSV at `out`."""
    plots.save(plots.times(run, rows), picture(out, "time"))
    plots.save(plots.speedups(run, rows), picture(out, "speedup"))


def summarise(rows: Sequence[Record]) -> None:
    """Prints the table and the crossovers."""
    print(table(rows))
    for (causal, mode), length in crossovers(rows).items():
        mask = "causal" if causal else "full"
        print(f"crossover, {mask} {mode}: " + (f"T = {length}" if length else "not within these lengths"))


def list_cells(flags: argparse.Namespace, device: jax.Device) -> list[Cell]:
    """The rows of the run, those that are compared next to each other."""
    asked = ["xla", *map(workload.implementation_of, flags.bwd_mode)]
    names = workload.runnable(asked, harness.DTYPES[flags.dtype], device)
    called = {"xla": "math", "plain": "math", "triton": "flash"}
    return list(dict.fromkeys(Cell(case, name, called.get(name, name)) for causal in (False, True)
                              for case in workload.cases(flags, causal) for name in names))


def measure(cells: Sequence[Cell], flags: argparse.Namespace, device: jax.Device) -> Iterator[Record]:
    """A row for each cell, in order."""
    compiled = compiling.compile_all(cells, build, kernels_of, flags.workers, device)
    input_sets: tuple[Case | None, list] = None, []
    with jax.default_device(device), tqdm(cells, desc="timing   ", bar_format=compiling.BAR) as progress:
        for cell in progress:
            progress.set_postfix_str(str(cell))
            if input_sets[0] != cell.case:
                input_sets = cell.case, workload.rotating_inputs(cell.case, flags.seed)
            # What is done gives its memory back.
            yield row_of(cell, compiled.pop(cell), input_sets[1], flags)


def build(cell: Cell) -> tuple[Callable, tuple]:
    """The meta-gradient of a cell, and the shapes of its arguments."""
    function = workload.PASSES["meta-gradient"](workload.attention_of(cell.implementation, cell.case))
    return function, tuple(jax.ShapeDtypeStruct(shape, cell.case.dtype)
                           for shape in (cell.case.shape, cell.case.key_shape, cell.case.key_shape))


def kernels_of(cell: Cell) -> Hashable:
    """The same for cells with the same kernels.

    The modes' kernels are the same at every length; in jttt's own, the length says how many programs share a
    block's work, and that is compiled in.
    """
    return cell.implementation, cell.case.causal, cell.case.t if cell.implementation == "triton" else None


def row_of(cell: Cell, compiled: jax.stages.Compiled | str, input_sets: list, flags: argparse.Namespace) -> Record:
    """The row of a cell, of which there may be nothing but the reason why it was not compiled."""
    temporary_bytes = None
    if isinstance(compiled, str):
        measured = Measurement(failure=compiled)
    else:
        temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        measured = harness.attempt(lambda: harness.summary(harness.time_launches(
            compiled, input_sets, iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats)))
    return {"causal": cell.case.causal, "t": cell.case.t, "mode": cell.mode, "mean_ms": measured.mean,
            "deviation_ms": measured.deviation, "median_ms": measured.milliseconds,
            "temporary_bytes": temporary_bytes, "failure": measured.failure}


def crossovers(rows: Sequence[Record]) -> dict[tuple[bool, str], int | None]:
    """For each mask and mode, the least length from which on the mode is faster than math, of those measured.

    What failed takes forever; where both failed neither is faster.
    """
    times = {(row["causal"], row["mode"], row["t"]): row["median_ms"] or float("inf") for row in rows}
    found: dict[tuple[bool, str], int | None] = {}
    for causal, mode, t in sorted(times, key=lambda key: key[2]):
        if mode == "math" or (causal, "math", t) not in times:
            continue
        first = found.get((causal, mode))
        faster = times[causal, mode, t] < times[causal, "math", t]
        found[causal, mode] = (first or t) if faster else None
    return found


def table(rows: Sequence[Record]) -> str:
    """The rows, with their speed-up over math."""
    math = {(row["causal"], row["t"]): row["median_ms"] for row in rows if row["mode"] == "math"}
    header = ("mask", "T", "mode", "mean ms", "deviation", "median ms", "speed-up", "temporary")
    lines = []
    for row in rows:
        time, base = row["median_ms"], math.get((row["causal"], row["t"]))
        lines.append((
            "causal" if row["causal"] else "full", str(row["t"]), row["mode"],
            row["failure"] or f"{row['mean_ms']:.3f}", f"{row['deviation_ms']:.3f}" if time else "",
            f"{time:.3f}" if time else "", f"{base / time:.2f}x" if time and base else "",
            harness.format_bytes(row["temporary_bytes"])))
    return harness.format_table(header, lines)


def to_csv(run: Record, rows: Sequence[Record]) -> str:
    """The rows under lines that say where, when and how they came about."""
    text = io.StringIO()
    for name, value in run.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {version}" for key, version in value.items())
        text.write(f"# {name}: {value}\n")
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def from_csv(text: str) -> tuple[Record, list[Record]]:
    """What `to_csv` was given, as far as the text has it."""
    lines = text.splitlines()
    run = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows: list[Record] = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        parsed: Record = {name: (NUMBERS.get(name, str)(text) if text else None) for name, text in row.items()}
        rows.append(parsed | {"causal": row["causal"] == "True"})
    return run, rows


def picture(out: Path, name: str) -> Path:
    """Where a picture of the results at `out` is kept."""
    return out.with_name(f"{out.stem}-{name}.png")


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_problem_flags(parser, h=1, t=(512, 1024, 2048, 4096, 8192, 16384), d=64, dtype="fp16",
                              t_flags=("--ts", "--t"))
    measured = parser.add_argument_group("measured")
    measured.add_argument(
        "--bwd_mode", type=harness.one_of(*jttt.modes.BWD_MODES), default=["flash"], metavar="MODE,...",
        help=f"which backwards beside math: {', '.join(jttt.modes.BWD_MODES)}, or all (default flash)")
    harness.add_run_flags(parser, iters=8, warmup=2, repeats=4, suffix=".csv")
    compiling.add_workers_flag(parser)
    parser.add_argument("--draw", type=Path, metavar="FILE.csv",
                        help="measure nothing; draw the pictures of this file's rows, and print them")
    return parser


if __name__ == "__main__":
    main()
