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

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one function took on one problem; what is not known because it failed is None.

    Attributes:
      milliseconds: median time of a launch, over the repeats.
      spread: distance between the quartiles of those times, in milliseconds.
      mean, deviation: their mean and standard deviation, in milliseconds.
      temporary_bytes: memory that XLA sets aside for a launch beyond its inputs and outputs.
      first_call_seconds: tracing, compiling and running it once.
      failure: "out of memory", or another reason where one was caught (`attempt`), or None.
    """

    milliseconds: float | None = None
    spread: float | None = None
    mean: float | None = None
    deviation: float | None = None
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
    look: Callable[[Any], Any] = jax.block_until_ready,
) -> Measurement:
    """Compiles `function` and times it; running out of memory is a result, not an error. `look` sees what the first
    launch computes."""
    temporary_bytes = None
    try:
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*input_sets[0]).compile()
        temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        look(compiled(*input_sets[0]))
        first_call_seconds = time.perf_counter() - start
        times = time_launches(compiled, input_sets, iters=iters, warmup=warmup, repeats=repeats)
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return Measurement(temporary_bytes=temporary_bytes, failure="out of memory")
    return dataclasses.replace(summary(times), temporary_bytes=temporary_bytes, first_call_seconds=first_call_seconds)


def summary(times: Sequence[float]) -> Measurement:
    """What a list of times, in milliseconds, comes to."""
    low, median, high = map(float, np.percentile(times, [25, 50, 75]))
    return Measurement(median, high - low, float(np.mean(times)), float(np.std(times)))


def attempt(measurement: Callable[[], Measurement]) -> Measurement:
    """A measurement, or the reason why there is none: a run goes on after what fails in it."""
    try:
        return measurement()
    except Exception as error:
        return Measurement(failure=reason(error))


def reason(error: Exception) -> str:
    """An error in a few words, for a cell of a table."""
    if _is_out_of_memory(error):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:100]


def _is_out_of_memory(error: Exception) -> bool:
    return re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE) is not None


def time_launches(
    launch: Callable, input_sets: Sequence[tuple], *, iters: int, warmup: int, repeats: int,
    wait: Callable[[list], Any] = jax.block_until_ready,
) -> list[float]:
    """Milliseconds per launch in each of `repeats` batches of `iters` launches.

    Launches of a batch go out back to back, each on the next set of inputs, and the host waits
    once, at the batch's end: the device works as it would inside a training loop, and the cost
    of a launch hides behind the work before it. As in such a loop, outputs are dropped soon: XLA
    records the launches of a program as a CUDA graph anew wherever its arrays have new addresses. On a
    CPU, which may run launches out of order, all are held, and the wait is for all. `wait` does so,
    for what is not JAX's.
    """
    inputs = itertools.cycle(input_sets)

    def batch(launches: int) -> float:
        start = time.perf_counter()
        outputs = [launch(*next(inputs))]
        held = launches if _on_cpu(outputs) else 2
        for _ in range(launches - 1):
            outputs = [*outputs[-held + 1:], launch(*next(inputs))]
        wait(outputs)
        return time.perf_counter() - start

    batch(warmup)
    return [1e3 * batch(iters) / iters for _ in range(repeats)]


def _on_cpu(outputs: Any) -> bool:
    arrays = [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
    return any(device.platform == "cpu" for x in arrays for device in x.devices())


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
    packages = ("jax", "jaxlib", "triton", "jax-triton", "torch", "tokamax")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"python": sys.version.split()[0]} | {p: v for p in packages if (v := _version(p))},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *argv]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def default_out(command: str, device: jax.Device, suffix: str = ".json") -> Path | None:
    """Where a run on a GPU is kept; one on a CPU is a try-out, kept only where `--out` says."""
    if device.platform == "cpu":
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return RESULTS / f"{command}-{slug}{suffix}"


def save_json(path: Path, content: object) -> None:
    """Writes `content` whole or not at all: a run that is killed leaves the file before it."""
    save_text(path, json.dumps(content, indent=1) + "\n")


def save_text(path: Path, text: str) -> None:
    """The same, of a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
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


def one_of(*known: str) -> Callable[[str], list[str]]:
    """A flag's value that lists some of the known names, or `all`, for `argparse`."""

    def parse_list(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}, known are {', '.join(known)}, or all")
        return names

    return parse_list


def add_problem_flags(parser: argparse.ArgumentParser, *, h: int, t: Sequence[int], d: int, dtype: str,
                      t_flags: Sequence[str] = ("--t",)) -> argparse._ArgumentGroup:
    """The flags that tell an attention problem, the same in every command, with a command's own defaults."""
    problem = parser.add_argument_group("problem", "query is [batch, length, heads, width], and attends to itself")
    problem.add_argument("--b", type=positive_int, default=1, help="batch size (default 1)")
    problem.add_argument("--h", type=positive_int, default=h, help=f"heads (default {h})")
    problem.add_argument(
        "--k", type=positive_int,
        help="key heads, of which each serves --h / --k heads (default: as many as --h)",
    )
    lengths = ",".join(map(str, t))
    problem.add_argument(
        *t_flags, dest="t", type=comma_separated(positive_int), default=list(t), metavar="T,T,...",
        help=f"sequence lengths (default {lengths})",
    )
    problem.add_argument("--d", type=positive_int, default=d, help=f"width of a head (default {d})")
    problem.add_argument(
        "--dtype", choices=DTYPES, default=dtype,
        help=f"dtype of query, key and value (default {dtype}); in fp32 on a GPU, the products of "
        "others than jttt are tf32 unless JAX_DEFAULT_MATMUL_PRECISION says otherwise",
    )
    return problem


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, jax.Device]:
    """The flags of a command that has those below and above, and the device that they ask for."""
    flags = parser.parse_args(argv)
    if getattr(flags, "k", None) and flags.h % flags.k:
        parser.error(f"argument --k: {flags.k} key heads for {flags.h} heads; expected a divisor of --h")
    try:
        return flags, select_device(flags.device)
    except RuntimeError as error:
        parser.error(f"argument --device: {error}")


def add_run_flags(parser: argparse.ArgumentParser, *, iters: int = 10, repeats: int = 7, warmup: int = 3,
                  suffix: str = ".json") -> None:
    """The flags that every command has: how to time, where to run, where to write."""
    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--iters", type=positive_int, default=iters, metavar="I",
        help=f"launches back to back between two synchronisations (default {iters})",
    )
    timing.add_argument(
        "--repeats", type=positive_int, default=repeats, metavar="R",
        help=f"batches of --iters launches; medians and the like are over these (default {repeats})",
    )
    timing.add_argument(
        "--warmup", type=positive_int, default=warmup, metavar="W",
        help=f"launches before the first that is timed (default {warmup})",
    )
    add_place_flags(parser, suffix=suffix)


def add_place_flags(parser: argparse.ArgumentParser, *, suffix: str = ".json") -> None:
    """Those of them that say where to run and where to write."""
    place = parser.add_argument_group("run")
    place.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    place.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto",
        help="where to run; auto: a GPU if JAX finds one (default auto); a CPU skips Triton",
    )
    place.add_argument(
        "--out", type=Path, metavar=f"FILE{suffix}",
        help=f"where to save the results (default: benchmarks/results/COMMAND-DEVICE{suffix} on a "
        "GPU, nowhere on a CPU)",
    )
