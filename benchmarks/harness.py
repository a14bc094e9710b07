"""How every benchmark times a function, and describes, prints and saves what it measured."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one function took on one problem; what is not known because it failed is None.

    Attributes:
      milliseconds: median time of a launch, over the repeats.
      spread: distance between the quartiles of those times, in milliseconds.
      temporary_bytes: memory that XLA sets aside for a launch beyond its inputs and outputs.
      first_call_seconds: tracing, compiling and running it once.
      failure: "out of memory", or None.
    """

    milliseconds: float | None = None
    spread: float | None = None
    temporary_bytes: int | None = None
    first_call_seconds: float | None = None
    failure: str | None = None


def measure(
    function: Callable,
    input_sets: Sequence[tuple],
    *,
    iters: int,
    warmup: int,
    repeats: int,
) -> Measurement:
    """Compiles `function` and times it; running out of memory is a result, not an error."""
    temporary_bytes = None
    try:
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*input_sets[0]).compile()
        temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        jax.block_until_ready(compiled(*input_sets[0]))
        first_call_seconds = time.perf_counter() - start
        times = time_launches(compiled, input_sets, iters=iters, warmup=warmup, repeats=repeats)
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE):
            raise
        return Measurement(temporary_bytes=temporary_bytes, failure="out of memory")
    low, median, high = np.percentile(times, [25, 50, 75])
    return Measurement(float(median), float(high - low), temporary_bytes, first_call_seconds)


def time_launches(
    launch: Callable, input_sets: Sequence[tuple], *, iters: int, warmup: int, repeats: int
) -> list[float]:
    """Milliseconds per launch in each of `repeats` batches of `iters` launches.

    Launches of a batch go out back to back, each on the next set of inputs, and the host waits
    once, at the batch's end: the device works as it would inside a training loop, and the cost
    of a launch hides behind the work before it. It waits for every launch, not only the last,
    since a CPU may run them out of order; so a batch holds the outputs of all its launches.
    """
    inputs = itertools.cycle(input_sets)

    def batch(launches: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([launch(*next(inputs)) for _ in range(launches)])
        return time.perf_counter() - start

    batch(warmup)
    return [1e3 * batch(iters) / iters for _ in range(repeats)]


class Task(NamedTuple):
    """One cell of a benchmark: `run` gives the records it adds to a section of the report."""

    section: str
    description: str
    run: Callable[[], Iterable[Record]]


def run(tasks: Sequence[Task], report: Record, out: Path | None, device: jax.Device) -> None:
    """Runs each task on `device`, adds its records to `report`, and saves what there is so far.

    The progress bar counts tasks and names the one that is running. It foretells no end: a task
    can take a thousand times as long as the one before.
    """
    bar_format = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed} {desc}"
    with jax.default_device(device), tqdm(tasks, bar_format=bar_format) as progress:
        for task in progress:
            progress.set_description_str(task.description)
            report[task.section] += task.run()
            if out:
                save_json(out, report)


def select_device(name: str) -> jax.Device:
    """The first device of a platform; "auto" takes the platform that JAX prefers here."""
    return jax.devices(None if name == "auto" else name)[0]


def describe_run(module: str, argv: Sequence[str], device: jax.Device) -> Record:
    """What someone needs to know, or to repeat, a run: the head of every results file."""
    packages = ("jax", "jaxlib", "triton", "jax-triton")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"python": sys.version.split()[0]} | {p: _version(p) for p in packages},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *argv]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def default_out(command: str, device: jax.Device) -> Path | None:
    """Where a run on a GPU is kept; one on a CPU is a try-out, kept only where `--out` says."""
    if device.platform == "cpu":
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return RESULTS / f"{command}-{slug}.json"


def save_json(path: Path, content: object) -> None:
    """Writes `content` whole or not at all: a run that is killed leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, path)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, aligned to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in [header, rule, *rows]
    )


def format_number(number: float | None, spec: str, unit: str = "") -> str:
    """A number of a table, empty where there is none."""
    return "" if number is None else f"{number:{spec}}{unit}"


def format_bytes(count: int | None) -> str:
    """Mebibytes, the one unit, so that a column can be compared at a glance."""
    return "" if count is None else f"{count / 2**20:,.1f} MiB"


def positive_int(text: str) -> int:
    """A flag's value that counts something, for `argparse`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def comma_separated(parse: Callable) -> Callable[[str], list]:
    """A flag's value that lists several, as in `--t 1024,4096`, for `argparse`."""

    def parse_list(text: str) -> list:
        return [parse(part) for part in text.split(",")]

    parse_list.__name__ = f"list of {parse.__name__}"
    return parse_list


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every command has: how to time, where to run, where to write."""
    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--iters", type=positive_int, default=10, metavar="I",
        help="launches back to back between two synchronisations (default 10)",
    )
    timing.add_argument(
        "--repeats", type=positive_int, default=7, metavar="R",
        help="batches of --iters launches; the median and the quartiles are over these (default 7)",
    )
    timing.add_argument(
        "--warmup", type=positive_int, default=3, metavar="W",
        help="launches before the first that is timed (default 3)",
    )
    place = parser.add_argument_group("run")
    place.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    place.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto",
        help="where to run; auto: a GPU if JAX finds one (default auto)",
    )
    place.add_argument(
        "--out", type=Path, metavar="FILE.json",
        help="where to save the results (default: benchmarks/results/COMMAND-DEVICE.json on a "
        "GPU, nowhere on a CPU)",
    )
