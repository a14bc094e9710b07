"""What the kernels must reach, measured beside whom they are compared with, in one run.

    python -m benchmarks.targets                          # on a GPU; writes benchmarks/results/targets-<device>.json
    python -m benchmarks.targets --rows forward,backward  # some of the rows

Each row names a problem, what is measured of it, and the least or most that it may be:

    forward      the forward against cuDNN's
    backward     forward and backward, of a random cotangent, against cuDNN's
    order-two    the rate of the kernels of order two alone
    meta         the meta-gradient (benchmarks.gradgrad) against XLA's, many heads in bfloat16
    meta-single  the same of one head in float16, causal and not
    chunk        the same of a chunk of 1024 queries on a cache, in a window of 8192; XLA has a dense mask
    long         the meta-gradient of one long sequence: memory, and rate beside that of a shorter one
    window       each pass under a window of 1024 against full causal
    grouped      8 query heads for each key head against as many key heads as query heads
    first-call   the meta-gradient in a process that just began: tracing, kernels, XLA, running once

XLA and cuDNN are jax.nn.dot_product_attention(..., implementation="xla" or "cudnn"). Inputs are random and
bfloat16 unless a row says otherwise. Everything is compiled first, by --workers processes and threads
(benchmarks.compiling), then timed, one program at a time: medians over batches of launches that go out back
to back. A peer that runs out of memory has lost; one that fails otherwise leaves its row open.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks import compiling, harness, workload
from benchmarks.harness import Measurement, Record
from benchmarks.workload import Attention, Case
from jttt import dot_product_attention, passes, reference
from jttt.spec import AttentionSpec, default_precision

ROWS = ("forward", "backward", "order-two", "meta", "meta-single", "chunk", "long", "window", "grouped", "first-call")


@dataclasses.dataclass(frozen=True)
class Program:
    """One thing to time.

    Attributes:
      what: a name of `WORK`.
      who: "jttt", "xla" or "cudnn".
      case: the problem; its t counts queries.
      cache: keys that stand before the first query.
      window: keys that a causal query sees, itself the last; None for all.
    """

    what: str
    who: str
    case: Case
    cache: int = 0
    window: int | None = None

    @property
    def problem(self) -> str:
        """The problem in the axis letters of `jax.nn.dot_product_attention`."""
        case = self.case
        sizes = f"B{case.b} N{case.n}" + (f" K{case.k}" if case.k != case.n else "") + f" H{case.h} T{case.t}"
        sizes += f" S{self.cache + case.t}" if self.cache else ""
        mask = f"window {self.window}" if self.window else "causal" if case.causal else "full"
        return f"{sizes} {case.dtype} {mask}"

    def __str__(self) -> str:
        return f"{self.who} {self.what}, {self.problem}"


class Row(NamedTuple):
    """A target: what is measured of `ours`, beside `peer` where there is one, and its bound."""

    name: str
    ours: Program
    peer: Program | None
    quantity: str
    bound: float


class Quantity(NamedTuple):
    """A number that comes of the measurements of a row's two programs, and whether more of it is better."""

    value: Callable[[Row, Measurement, Measurement | None], float]
    more: bool


def rate(program: Program, measured: Measurement) -> float:
    """TFLOP/s, by the operations that the algorithm needs on a problem without cache and window."""
    return workload.operations(program.what, program.case) / measured.milliseconds / 1e9


FIRST_CALL = "first call (s)"

QUANTITIES = {
    "speed-up": Quantity(lambda row, ours, peer: peer.milliseconds / ours.milliseconds, True),
    "TFLOP/s": Quantity(lambda row, ours, peer: rate(row.ours, ours), True),
    "rate / peer's": Quantity(lambda row, ours, peer: rate(row.ours, ours) / rate(row.peer, peer), True),
    "memory / query": Quantity(lambda row, ours, peer: ours.temporary_bytes / (
        math.prod(row.ours.case.shape) * jnp.dtype(row.ours.case.dtype).itemsize), False),
    FIRST_CALL: Quantity(lambda row, ours, peer: ours.first_call_seconds, False),
}


def list_rows(names: Sequence[str], scale: float = 1) -> list[Row]:
    """The named rows of the table, in its order; `scale` shrinks every length."""
    return [row for row in _rows(scale) if row.name in names]


def _rows(scale: float) -> Iterator[Row]:
    def length(tokens: int) -> int:
        return max(1, int(tokens * scale))

    def case(t: int, n: int, h: int, *, b: int = 1, k: int | None = None, dtype: str = "bfloat16",
             causal: bool = True) -> Case:
        return Case(b=b, t=length(t), n=n, k=k or n, h=h, dtype=dtype, causal=causal)

    def against(name: str, what: str, peer: str, problem: Case, least: float, **more: Any) -> Row:
        """A row that asks for a speed-up over another's attention."""
        ours, other = (Program(what, who, problem, **more) for who in ("jttt", peer))
        return Row(name, ours, other, "speed-up", least)

    for name, what in (("forward", "forward"), ("backward", "gradient")):
        for h in (128, 64):
            for t, least in ((1024, 1 / 1.2), (4096, 1.0), (8192, 1.0), (16384, 1.0)):
                yield against(name, what, "cudnn", case(t, 16, h), least)

    for h, least in ((128, 430), (64, 450)):
        ours = Program("order two", "jttt", case(8192, 1, h, b=16, causal=False))
        yield Row("order-two", ours, None, "TFLOP/s", least)

    for t, least in ((1024, 2.5), (4096, 5), (8192, 12)):
        yield against("meta", "meta-gradient", "xla", case(t, 16, 128), least)
    for causal in (True, False):
        for t, least in ((512, 1), (2048, 1.2), (8192, 2.5), (16384, 4)):
            yield against("meta-single", "meta-gradient", "xla", case(t, 1, 64, dtype="float16", causal=causal), least)
    for n, h in ((12, 64), (16, 96)):
        yield against("chunk", "meta-gradient", "xla", case(1024, n, h), 4, cache=length(8192), window=length(8192))

    ours, shorter = (Program("meta-gradient", "jttt", case(t, 8, 128)) for t in (131072, 16384))
    yield Row("long", ours, None, "memory / query", 24)
    yield Row("long", ours, shorter, "rate / peer's", 0.85)

    for what in ("forward", "gradient", "meta-gradient"):
        full = Program(what, "jttt", case(32768, 8, 128))
        yield Row("window", dataclasses.replace(full, window=length(1024)), full, "speed-up", 12)
    for what in ("gradient", "meta-gradient"):
        grouped, alike = (Program(what, "jttt", case(4096, 32, 128, k=k)) for k in (4, 32))
        yield Row("grouped", grouped, alike, "speed-up", 1 / 1.1)

    yield Row("first-call", Program("meta-gradient", "jttt", case(4096, 16, 128)), None, FIRST_CALL, 25)


# What a program computes.


def attention_of(program: Program) -> Attention:
    """The attention of a program; a window is a dense mask for those who have no other way to be told."""
    case, cache, window = program.case, program.cache, program.window
    if program.who == "jttt":
        return functools.partial(dot_product_attention, is_causal=case.causal, query_offset=cache,
                                 local_window_size=None if window is None else (window - 1, 0))
    if not cache and window is None:
        return functools.partial(workload.IMPLEMENTATIONS[program.who], causal=case.causal)

    def masked(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        at, keys = jnp.arange(cache, cache + case.t)[:, None], jnp.arange(cache + case.t)
        visible = (keys <= at) & (keys > at - window)
        return jax.nn.dot_product_attention(query, key, value, mask=visible[None, None], implementation=program.who)

    return masked


def forward_and_backward(attention: Attention) -> Callable:
    """The gradient of ⟨attention, d_output⟩ with respect to query, key and value, of all four arrays."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(attention, query, key, value)[1](d_output)

    return run


def order_two(_: Attention) -> Callable:
    """The passes of order two alone, of what `order_two_inputs` prepares. Attention sees every key."""

    def run(operands: dict[str, jax.Array], output: jax.Array) -> dict[str, jax.Array]:
        spec = _spec(operands["query"])
        rest = {name: x for name, x in operands.items() if name != "delta"}
        first = passes.run("tangent", spec, rest | {"output": output}, ("t_output", "t_lse", "row_term"))
        t_output = first.pop("t_output")
        return {"t_output": t_output,
                **passes.run("double_backward", spec, operands | first, ("g_query", "g_key", "g_value"))}

    return run


def order_two_inputs(query: jax.Array, key: jax.Array, value: jax.Array, d_output: jax.Array, t_query: jax.Array,
                     t_key: jax.Array, t_value: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """The operands of both passes, with the rows that the forward and the backward leave behind; the output."""
    inputs = dict(query=query, key=key, value=value)
    made = passes.run("forward", _spec(query), inputs, ("output", "lse"))
    delta = reference.delta(made["output"], d_output, None)
    return inputs | dict(d_output=d_output, t_query=t_query, t_key=t_key, t_value=t_value, lse=made["lse"],
                         delta=delta), made["output"]


def _spec(query: jax.Array) -> AttentionSpec:
    return AttentionSpec(scale=query.shape[-1] ** -0.5, precision=default_precision())


# {what: (its function, an array of query's shape for each q, and of key's for each k)}
WORK: dict[str, tuple[Callable[[Attention], Callable], str]] = {
    "forward": (workload.forward, "qkk"),
    "gradient": (forward_and_backward, "qkkq"),
    "meta-gradient": (workload.meta_gradient, "qkk"),
    "order two": (order_two, "qkkqqkk"),
}


def shapes_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """The shapes of what is drawn for a program."""
    case = program.case
    keys = case.b, program.cache + case.t, case.k, case.h
    return tuple(case.shape if letter == "q" else keys for letter in WORK[program.what][1])


def input_sets(program: Program, seed: int) -> list[tuple]:
    """As many sets of random inputs as a cache cannot hold."""
    shapes, dtype = shapes_of(program), program.case.dtype
    count = workload.sets_beyond_cache(sum(map(math.prod, shapes)) * jnp.dtype(dtype).itemsize)
    drawn = [workload.normal(key, shapes, dtype) for key in jax.random.split(jax.random.key(seed), count)]
    if program.what != "order two":
        return drawn
    prepare = jax.jit(order_two_inputs)
    return [prepare(*arrays) for arrays in drawn]


# How it is measured.


def measure(rows: Sequence[Row], flags: argparse.Namespace, device: jax.Device) -> Iterator[Record]:
    """A record for each row, in order."""
    programs = dict.fromkeys(x for row in rows for x in (row.ours, row.peer) if x and row.quantity != FIRST_CALL)
    # Before others take the processor's cores.
    cold = {row.ours: harness.attempt(functools.partial(first_call, row.ours, device)) for row in rows
            if row.quantity == FIRST_CALL}
    compiled = compiling.compile_all(list(programs), build, kernels_of, flags.workers, device)

    measurements: dict[Program, Measurement] = {}
    with jax.default_device(device), tqdm(rows, desc="timing   ", bar_format=compiling.BAR) as progress:
        for row in progress:
            progress.set_postfix_str(str(row.ours))
            if row.quantity == FIRST_CALL:
                yield record(row, cold[row.ours], None)
                continue
            for program in (row.ours, row.peer):
                if program and program not in measurements:
                    # What is done gives its memory back.
                    measurements[program] = measured(program, compiled.pop(program), flags.seed)
            yield record(row, measurements[row.ours], measurements.get(row.peer))


def measured(program: Program, compiled: jax.stages.Compiled | str, seed: int) -> Measurement:
    """The times of a program, or why there are none: perhaps there is only the reason why it was not compiled."""
    if isinstance(compiled, str):
        return Measurement(failure=compiled)
    return harness.attempt(lambda: timed(compiled, input_sets(program, seed)))


def build(program: Program) -> tuple[Callable, tuple]:
    """The function of a program, and the shapes of its arguments."""
    arguments = tuple(jax.ShapeDtypeStruct(shape, program.case.dtype) for shape in shapes_of(program))
    if program.what == "order two":
        arguments = jax.eval_shape(order_two_inputs, *arguments)
    return WORK[program.what][0](attention_of(program)), arguments


def kernels_of(program: Program) -> Hashable:
    """The same for programs with nearly the same kernels; None for cuDNN's attention, which cannot be exported.

    Programs of different lengths have the same, unless there is but one head: then several share a block's work,
    and how many they are, which depends on the length, is compiled in.
    """
    case = program.case
    alike = case if case.n == 1 else dataclasses.replace(case, t=0)
    return None if program.who == "cudnn" else dataclasses.replace(program, case=alike)


def timed(executable: jax.stages.Compiled, sets: list[tuple]) -> Measurement:
    """Median over batches of about 20 ms; of single launches, and fewer of them, where one takes more than 50."""
    jax.block_until_ready(executable(*sets[0]))  # Loads the kernels.
    [once] = harness.time_launches(executable, sets, iters=1, warmup=1, repeats=1)
    times = harness.time_launches(executable, sets, iters=min(max(1, round(20 / once)), 50), warmup=1,
                                  repeats=3 if once > 50 else 7)
    temporary_bytes = executable.memory_analysis().temp_size_in_bytes
    return dataclasses.replace(harness.summary(times), temporary_bytes=temporary_bytes)


def first_call(program: Program, device: jax.Device) -> Measurement:
    """What a call takes from tracing to its result, in a process that has not compiled anything before."""
    # This process may have most of the GPU's memory already, and others may have compiled the same before.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks import targets; targets.call_first()", device.platform,
         json.dumps(dataclasses.asdict(program))], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process died"])[-1])
    return Measurement(first_call_seconds=float(done.stdout.split()[-1]))


def call_first() -> None:
    """The other process of `first_call`: a platform and a program are its arguments, seconds its output."""
    platform, text = sys.argv[1:]
    fields = json.loads(text)
    program = Program(**fields | {"case": Case(**fields["case"])})
    with jax.default_device(harness.select_device(platform)):
        measured = harness.measure(WORK[program.what][0](attention_of(program)), input_sets(program, seed=0), iters=1,
                                   warmup=1, repeats=1)
    print(measured.first_call_seconds)


# What comes of it.


def record(row: Row, ours: Measurement, peer: Measurement | None) -> Record:
    """A row with its value, and whether it is met: None where that cannot be told."""
    quantity, value, met, compared = QUANTITIES[row.quantity], None, None, None
    if peer:
        compared = dataclasses.asdict(row.peer) | dataclasses.asdict(peer) | {"name": peer_name(row)}
    if ours.failure:
        met = False
    elif peer and peer.failure:
        met = True if peer.failure == "out of memory" else None
    else:
        value = quantity.value(row, ours, peer)
        met = value >= row.bound if quantity.more else value <= row.bound
    return {
        "row": row.name, "what": row.ours.what, "problem": row.ours.problem,
        "ours": dataclasses.asdict(row.ours) | dataclasses.asdict(ours),
        "peer": compared, "quantity": row.quantity, "value": value, "bound": row.bound, "met": met,
    }


def peer_name(row: Row) -> str:
    """Whom a row compares with: another's attention, or how another problem of ours differs."""
    if row.peer.who != row.ours.who:
        return row.peer.who
    words = set(row.ours.problem.split())
    return " ".join(word for word in row.peer.problem.split() if word not in words) or "as many key heads"


def table(records: Sequence[Record]) -> str:
    """Each row with its times and its target."""
    header = ("row", "what", "problem", "ours ms", "peer", "peer ms", "quantity", "value", "target", "")
    lines = []
    for x in records:
        ours, peer = x["ours"], x["peer"]
        sign = "≥" if QUANTITIES[x["quantity"]].more else "≤"
        lines.append((
            x["row"], x["what"], x["problem"], _time(ours), peer["name"] if peer else "", _time(peer) if peer else "",
            x["quantity"], "" if x["value"] is None else f"{x['value']:.4g}", f"{sign} {x['bound']:.3g}",
            {True: "met", False: "MISSED", None: "open"}[x["met"]]))
    return harness.format_table(header, lines)


def _time(measured: Record) -> str:
    milliseconds = measured["milliseconds"]
    return (measured["failure"] or "")[:48] if milliseconds is None else f"{milliseconds:.4g}"


def main(argv: Sequence[str] | None = None, scale: float = 1) -> None:
    """Measures the rows that the flags ask for, saves them one by one, and prints the table.

    `scale` shrinks every length: tests run on a CPU, where the table's own would take days.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    flags, device = harness.parse(parser, argv)
    if device.platform != "gpu" and scale == 1:
        parser.error(f"argument --device: these rows need an NVIDIA GPU, and this is {device}")
    report = harness.describe_run("benchmarks.targets", argv, device) | {"results": []}
    out = flags.out or harness.default_out("targets", device)
    for row in measure(list_rows(flags.rows, scale), flags, device):
        report["results"].append(row)
        if out:
            harness.save_json(out, report)
    print(f"\n{report['device']}, {report['date']}\n{report['command']}\n\n{table(report['results'])}")
    counts = [sum(row["met"] is met for row in report["results"]) for met in (True, False, None)]
    print("\n{} met, {} missed, {} open".format(*counts))
    if out:
        print(f"saved {out}")


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=harness.one_of(*ROWS), default=list(ROWS), metavar="NAME,...",
                        help="which rows (default all)")
    compiling.add_workers_flag(parser)
    harness.add_place_flags(parser)
    return parser


if __name__ == "__main__":
    main()
