"""Attention and training on several devices beside one: time, memory and differences.

    python -m benchmarks.scaling                      # on a machine with several GPUs: all of it
    python -m benchmarks.scaling ring --ring-t 65536  # one part of it
    python -m benchmarks.scaling step --iters 4       # another, with fewer steps in each batch of launches
    JAX_NUM_CPU_DEVICES=4 python -m benchmarks.scaling --t 64 --ring-t 128 --h 4 --d 8 --scale 128   # a try-out

    batch   the meta-gradient of as many sequences as devices, sharded over the batch under jit, beside one
            sequence on one device: ideally it takes the same time
    heads   the meta-gradient of one sequence, sharded over its heads under jit, beside one device: ideally
            it takes the time divided by the devices
    ring    jttt.ring_attention of one long sequence in zigzag order, forward, gradient and meta-gradient,
            beside jttt.dot_product_attention on one device: how much the results differ (relative, in
            Frobenius norm), and time and temporary memory of a device divided by those of one
    step    a whole step of training, data parallel as examples.ttt_e2e.train makes it (gradients averaged,
            AdamW): the 125M model of benchmarks.ttt_e2e, T=8192, four sequences for each device, beside four
            on one device; ideally it takes the same time. The difference is that of the loss from the mean
            of those that one device finds for the same sequences, four by four

In batch, heads and ring attention is causal, the passes are those of benchmarks.gradgrad. The speed-up is the
throughput divided by one device's, the efficiency that speed-up divided by the number of devices. A launch of ring
takes up to seconds: its batches have a fifth of --iters.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jttt
from benchmarks import harness, ttt_e2e, workload
from benchmarks.harness import Record
from benchmarks.workload import Case
from examples.ttt_e2e import model, train

AXIS = "devices"

# Of a training step, on each device.
SEQUENCES = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for, saves it after every cell, and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    flags = parser.parse_args(argv)
    try:
        device = harness.select_device(flags.device)
    except RuntimeError as error:
        parser.error(f"argument --device: {error}")
    available = jax.devices(device.platform)
    count = flags.devices or len(available)
    if count > len(available):
        parser.error(f"argument --devices: {count} asked for, and this machine has {len(available)}")
    if flags.h % count or flags.ring_t % (2 * count):
        parser.error(f"argument --h or --ring-t: expected multiples of {count} and {2 * count} for {count} devices")

    mesh = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=available[:count])
    report = harness.describe_run("benchmarks.scaling", argv, device) | {"devices": count, "results": []}
    out = flags.out or harness.default_out(f"scaling-{count}", device)
    harness.run(list_tasks(flags, mesh), report, out, device)
    print_report(report)
    if out:
        print(f"\nsaved {out}")


def list_tasks(flags: argparse.Namespace, mesh: Mesh) -> list[harness.Task]:
    """Every cell of the run."""
    tasks = []
    for name in dict.fromkeys(flags.measurements):
        passes = PASSES.get(name, ("meta-gradient",))
        tasks += [harness.Task("results", f"{name} {pass_name}", functools.partial(
            MEASUREMENTS[name], pass_name, flags, mesh)) for pass_name in passes]
    return tasks


def measure_batch(pass_name: str, flags: argparse.Namespace, mesh: Mesh) -> list[Record]:
    """A sequence on each device."""
    one = problem(flags, b=1, t=flags.t)
    return compare("batch", pass_name, flags, one, attention(mesh), dataclasses.replace(one, b=mesh.size),
                   attention(mesh), NamedSharding(mesh, P(AXIS)))


def measure_heads(pass_name: str, flags: argparse.Namespace, mesh: Mesh) -> list[Record]:
    """Some heads on each device."""
    one = problem(flags, b=1, t=flags.t)
    return compare("heads", pass_name, flags, one, attention(mesh), one, attention(mesh),
                   NamedSharding(mesh, P(None, None, AXIS)))


def measure_ring(pass_name: str, flags: argparse.Namespace, mesh: Mesh) -> list[Record]:
    """Two slices of the sequence on each device."""
    flags = argparse.Namespace(**vars(flags) | {"iters": max(1, flags.iters // 5)})
    one, spec = problem(flags, b=1, t=flags.ring_t), P(None, AXIS)
    local = functools.partial(jttt.ring_attention, axis_name=AXIS, layout="zigzag", is_causal=True,
                              implementation=implementation(mesh))
    ring = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    records = compare("ring", pass_name, flags, one, attention(mesh), one, ring, NamedSharding(mesh, spec))
    if not any(record["failure"] for record in records):
        records[-1]["difference"] = difference(pass_name, one, attention(mesh), ring, NamedSharding(mesh, spec), flags)
    return records


def measure_step(pass_name: str, flags: argparse.Namespace, mesh: Mesh) -> list[Record]:
    """Some sequences on each device."""
    config = ttt_e2e.shrunk(ttt_e2e.PAPER, flags.scale)
    tokens = np.random.default_rng(flags.seed).integers(
        config.vocabulary, size=(SEQUENCES * mesh.size, config.sequence + 1), dtype=np.int32)
    alone, shared = (record_step(pass_name, flags, config, tokens, devices)
                     for devices in (mesh.devices[:1], mesh.devices))
    shared["difference"] = abs(shared["loss"] - alone["loss"]) / alone["loss"]
    return beside(alone, shared, mesh.size)


MEASUREMENTS = {"batch": measure_batch, "heads": measure_heads, "ring": measure_ring, "step": measure_step}

# Those of the measurements that are not of the meta-gradient alone.
PASSES = {"ring": tuple(workload.PASSES), "step": ("training step",)}


def problem(flags: argparse.Namespace, b: int, t: int) -> Case:
    return Case(b=b, t=t, n=flags.h, k=flags.h, h=flags.d, dtype=harness.DTYPES[flags.dtype], causal=True)


def implementation(mesh: Mesh) -> str | None:
    """Kernels by name on GPUs, so that nothing else can be measured there."""
    return "triton" if mesh.devices.flat[0].platform == "gpu" else None


def attention(mesh: Mesh) -> workload.Attention:
    return functools.partial(jttt.dot_product_attention, is_causal=True, implementation=implementation(mesh))


def compare(name: str, pass_name: str, flags: argparse.Namespace, one: Case, on_one: workload.Attention, several: Case,
            on_several: workload.Attention, sharding: NamedSharding) -> list[Record]:
    """The record of one device and that of all of them, which has what the first divided by it makes."""
    alone = record(name, pass_name, flags, one, on_one, sharding.mesh.devices.flat[0], 1)
    shared = record(name, pass_name, flags, several, on_several, sharding, sharding.mesh.size)
    return beside(alone, shared, workload.operations(pass_name, several) / workload.operations(pass_name, one))


def beside(alone: Record, shared: Record, work: float) -> list[Record]:
    """Both records, the second with what the first divided by it makes; it does `work` times as much."""
    if alone["milliseconds"] and shared["milliseconds"]:
        shared["speed_up"] = work * alone["milliseconds"] / shared["milliseconds"]
        shared["efficiency"] = shared["speed_up"] / shared["devices"]
    if alone["temporary_bytes"] and shared["temporary_bytes"]:
        shared["memory_ratio"] = shared["temporary_bytes"] / alone["temporary_bytes"]
    return [alone, shared]


def record(name: str, pass_name: str, flags: argparse.Namespace, case: Case, function: workload.Attention,
           place: jax.Device | NamedSharding, devices: int) -> Record:
    measured = harness.measure(
        workload.PASSES[pass_name](function), jax.device_put(workload.rotating_inputs(case, flags.seed), place),
        iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats)
    described = {"measurement": name, "pass": pass_name, "devices": devices} | case.describe()
    return described | dataclasses.asdict(measured)


def record_step(pass_name: str, flags: argparse.Namespace, config: model.Config, tokens: np.ndarray,
                devices: np.ndarray) -> Record:
    """The record of training steps on these devices, with the mean loss of all sequences before the first step."""
    training = train.Training(batch=SEQUENCES * len(devices), steps=1000, learning_rate=1e-3, seed=flags.seed)
    mesh = train.data_mesh(devices)
    state = train.start_state(config, training, mesh)
    batches = [jax.device_put(batch, NamedSharding(mesh, P("data")))
               for batch in np.split(tokens, len(tokens) // training.batch)]
    start = time.perf_counter()
    step = train.make_step(config, training, mesh).lower(state, batches[0]).compile()
    # A step takes the state's memory over, as in training.
    losses = [float(step(jax.tree.map(jnp.copy, state), batch)[1].loss) for batch in batches]
    first_call_seconds = time.perf_counter() - start

    def launch(batch: jax.Array) -> train.Record:
        nonlocal state
        state, numbers = step(state, batch)
        return numbers

    times = harness.time_launches(
        launch, [(batch,) for batch in batches], iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats)
    measured = dataclasses.replace(harness.summary(times), first_call_seconds=first_call_seconds,
                                   temporary_bytes=step.memory_analysis().temp_size_in_bytes)
    return {"measurement": "step", "pass": pass_name, "devices": len(devices),
            "shape": {"b": training.batch, "t": config.sequence}, "dtype": config.dtype, "loss": float(np.mean(losses)),
            "tokens_per_second": 1e3 * training.batch * config.sequence / measured.milliseconds,
            } | dataclasses.asdict(measured)


def difference(pass_name: str, case: Case, on_one: workload.Attention, ring: workload.Attention,
               sharding: NamedSharding, flags: argparse.Namespace) -> float:
    """The largest relative difference of an output over the ring from that of one device."""
    devices, first = sharding.mesh.size, sharding.mesh.devices.flat[0]
    inputs = workload.draw(case, jax.random.key(flags.seed))
    expected = jax.jit(workload.PASSES[pass_name](on_one))(*jax.device_put(inputs, first))
    moved = jax.device_put([jttt.to_zigzag(x, devices=devices) for x in inputs], sharding)
    results = jax.device_put(jax.jit(workload.PASSES[pass_name](ring))(*moved), first)
    return max(relative(jttt.from_zigzag(result, devices=devices), exact)
               for result, exact in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True))


def relative(result: jax.Array, exact: jax.Array) -> float:
    # Squares of the gradients of a mean over a long sequence would be zero in float32.
    scale = jnp.max(jnp.abs(exact)).astype(jnp.float32)
    exact, result = (x.astype(jnp.float32) / scale for x in (exact, result))
    return float(jnp.linalg.norm((result - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def print_report(report: Record) -> None:
    """Prints a report, as it is saved, for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"\n{report['devices']} × {report['device']}, {report['date']}\n{versions}\n{report['command']}\n")
    header = ("measurement", "pass", "B", "T", "devices", "ms", "spread", "tokens/s", "speed-up", "efficiency",
              "temporary", "of one device's", "difference")
    print(harness.format_table(header, [(
        row["measurement"], row["pass"], str(row["shape"]["b"]), str(row["shape"]["t"]), str(row["devices"]),
        row["failure"] or f"{row['milliseconds']:.3f}",
        harness.format_number(row["spread"], ".3f"),
        harness.format_number(row.get("tokens_per_second"), ",.0f"),
        harness.format_number(row.get("speed_up"), ".2f", "x"),
        harness.format_number(row.get("efficiency"), ".1%"),
        harness.format_bytes(row["temporary_bytes"]),
        harness.format_number(row.get("memory_ratio"), ".2f"),
        harness.format_number(row.get("difference"), ".1e"),
    ) for row in report["results"]]))


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "measurements", nargs="*", type=measurement_name, default=list(MEASUREMENTS), metavar="MEASUREMENT",
        help=f"what to measure: {', '.join(MEASUREMENTS)} (default all)")
    count = harness.positive_int
    problem = parser.add_argument_group("problem", "query, key and value are [B, T, N, H]; step has sizes of its own")
    problem.add_argument("--t", type=count, default=8192, help="sequence length of batch and heads (default 8192)")
    problem.add_argument("--ring-t", type=count, default=131072, metavar="T",
                         help="length of the whole sequence of ring (default 131072)")
    problem.add_argument("--h", type=count, default=16, help="heads (default 16)")
    problem.add_argument("--d", type=count, default=128, help="width of a head (default 128)")
    problem.add_argument("--dtype", choices=harness.DTYPES, default="bf16",
                         help="dtype of query, key and value (default bf16)")
    problem.add_argument("--scale", type=count, default=1,
                         help="divisor of all sizes of step, for a try-out; a power of two (default 1)")
    problem.add_argument("--devices", type=count, metavar="D", help="how many to use (default all there are)")
    harness.add_run_flags(parser)
    return parser


def measurement_name(text: str) -> str:
    """A known measurement's name, for `argparse`."""
    if text not in MEASUREMENTS:
        raise argparse.ArgumentTypeError(f"unknown measurement {text!r}, known are {', '.join(MEASUREMENTS)}")
    return text


if __name__ == "__main__":
    main()
