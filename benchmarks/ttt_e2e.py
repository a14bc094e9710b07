"""TTT-E2E as a whole: a training step beside one with XLA's attention, and what reading costs per token.

    python -m benchmarks.ttt_e2e                        # on a GPU, all parts
    python -m benchmarks.ttt_e2e --parts step           # one of: step, long, reading
    python -m benchmarks.ttt_e2e --scale 64 --iters 1   # a try-out on a CPU: everything 64 times smaller

The model is that of arXiv 2512.23675 at 125M: 12 blocks of width 768, 12 heads, MLPs of 1664, the last
3 blocks with a fast MLP, chunks of 1024, window 8192, 32,000 tokens with tied embeddings (111M weights),
bfloat16 on float32 weights; random tokens. A step is the loss and its gradient for all weights, with
each chunk's state kept and its inner step recomputed (checkpoint_every=1).

  step      T=8192, batch 4. "jttt" has jttt.chunk_attention in the chunks; "xla" has there what the
            authors' code has: chunk and cache concatenated, scores [chunk, window + chunk] stored, a dense mask,
            softmax in float32, through JAX's own autodiff. All else is the same, jttt's attention in the lower
            blocks included; so are the loss and the norm of the gradient, up to rounding.
  long      T=32768 and T=131072, batch 1, jttt.
  reading   milliseconds per token to prefill (learning from each chunk) and to decode, after 8192 to 131072 tokens

Memory is the peak of the process as the device's allocator counts it, "temporary" what XLA sets aside for
a step. The allocator never forgets its peak, so each cell runs in a process of its own.
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
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jttt
from benchmarks import harness
from benchmarks.harness import Record
from examples.ttt_e2e import model, reading, train

PAPER = model.Config(layers=12, width=768, heads=12, hidden=1664, vocabulary=32000, sequence=8192, chunk=1024,
                     window=8192)

# (sequence, batch, attention), and the lengths after which reading is timed.
STEPS = {"step": [(8192, 4, "jttt"), (8192, 4, "xla")], "long": [(32768, 1, "jttt"), (131072, 1, "jttt")]}
READ = (8192, 16384, 32768, 65536, 131072)
PARTS = ("step", "long", "reading")


def dense_chunk_attention(query: jax.Array, key: jax.Array, value: jax.Array, cache: jttt.KeyValueCache
                          ) -> tuple[jax.Array, jttt.KeyValueCache]:
    """`jttt.chunk_attention` as a few lines of JAX that store the scores."""
    T, window = query.shape[0], cache.window
    keys = jnp.concatenate([cache.key, key])
    values = jnp.concatenate([cache.value, value])
    t, s = jnp.arange(T)[:, None] + window, jnp.arange(T + window)[None, :]
    visible = (s <= t) & (s > t - window) & (s >= window - cache.length)
    scores = jnp.einsum("tnh,snh->nts", query, keys, preferred_element_type=jnp.float32) / math.sqrt(query.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("nts,snh->tnh", probabilities.astype(query.dtype), values), cache.append(key, value)


ATTENTIONS: dict[str, Callable] = {"jttt": jttt.chunk_attention, "xla": dense_chunk_attention}


def shrunk(config: model.Config, scale: int) -> model.Config:
    """The configuration with lengths, widths and vocabulary divided, for a try-out."""
    if scale == 1:
        return config
    return dataclasses.replace(
        config, layers=4, heads=2, width=max(16, config.width // scale), hidden=max(16, config.hidden // scale),
        vocabulary=max(32, config.vocabulary // scale), sequence=config.sequence // scale,
        chunk=config.chunk // scale, window=config.window // scale, dtype="float32")


# The cells; each runs in a process of its own.


def measure_step(flags: argparse.Namespace, sequence: int, batch: int, attention: str) -> Iterator[Record]:
    """Time and memory of the gradient of one training step, its loss and its norm."""
    config = shrunk(dataclasses.replace(PAPER, sequence=sequence), flags.scale)
    weights = model.init_weights(config, flags.seed)
    tokens = np.random.default_rng(flags.seed).integers(config.vocabulary, size=(batch, config.sequence + 1))
    found = {"loss": None, "gradient_norm": None, "tokens_per_second": None}

    def step(weights: model.Weights, tokens: jax.Array) -> tuple[jax.Array, model.Weights, jax.Array]:
        def loss(weights: model.Weights) -> jax.Array:
            return jnp.mean(model.batch_losses(weights, tokens, config, attend_chunk=ATTENTIONS[attention]))

        value, gradient = jax.value_and_grad(loss)(weights)
        return value, gradient, train.norm(gradient)

    def look(outputs: tuple[jax.Array, model.Weights, jax.Array]) -> None:
        found.update(loss=float(outputs[0]), gradient_norm=float(outputs[2]))

    measured = harness.measure(step, [(weights, jnp.asarray(tokens, jnp.int32))], iters=flags.iters,
                               warmup=flags.warmup, repeats=flags.repeats, look=look)
    if measured.milliseconds:
        found["tokens_per_second"] = batch * config.sequence / measured.milliseconds * 1e3
    yield {"attention": attention, "sequence": config.sequence, "batch": batch,
           "weights": model.parameter_count(weights), "peak_bytes": peak_bytes()} | found | dataclasses.asdict(measured)


def measure_reading(flags: argparse.Namespace) -> Iterator[Record]:
    """Milliseconds per token of prefill and of decoding after so many tokens, one sequence."""
    config = shrunk(PAPER, flags.scale)
    weights = model.init_weights(config, flags.seed)
    random = np.random.default_rng(flags.seed)
    reader = reading.start_reader(weights, config)
    read = 0

    def chunk() -> jax.Array:
        return jnp.asarray(random.integers(config.vocabulary, size=config.chunk + 1), jnp.int32)

    reader = jax.block_until_ready(reading.learn_chunk(weights, reader, chunk(), config))
    read += config.chunk
    for length in READ:
        length //= flags.scale
        while read < length - flags.repeats * config.chunk:
            reader = reading.learn_chunk(weights, reader, chunk(), config)
            read += config.chunk
        prefill = []
        while read < length:
            reader, seconds = timed(functools.partial(reading.learn_chunk, weights, reader, chunk(), config))
            prefill.append(1e3 * seconds / config.chunk)
            read += config.chunk
        decode = measure_decode(weights, reader, config, min(config.chunk, 128 // min(flags.scale, 16)), flags.repeats)
        yield {"tokens": read, "chunk": config.chunk, "window": config.window,
               "prefill_ms_per_token": float(np.median(prefill)), "decode_ms_per_token": float(np.median(decode))}


def measure_decode(weights: model.Weights, reader: reading.Reader, config: model.Config, tokens: int, repeats: int
                   ) -> list[float]:
    """Milliseconds per token to decode the first `tokens` of a chunk, greedily, a few times."""
    likeliest = jax.jit(lambda logits: jnp.argmax(logits, keepdims=True).astype(jnp.int32))

    def decode() -> jax.Array:
        buffer, token, one = reading.empty_buffer(config), jnp.zeros(1, jnp.int32), jnp.ones((), jnp.int32)
        for _ in range(tokens):
            buffer, logits = reading.read_tokens(weights, reader, buffer, token, one, config)
            token = likeliest(logits)
        return token

    decode()
    return [1e3 * timed(decode)[1] / tokens for _ in range(repeats)]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, when it is there, and the seconds until then."""
    start = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - start


def peak_bytes() -> int | None:
    """The most memory that the device's allocator has had in use; None where it does not count."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# The command.


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the flags ask for, saves it after every cell, and prints the tables."""
    argv = sys.argv[1:] if argv is None else argv
    if "--cell" not in argv:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # The cells need the memory; this process only waits.
    flags, device = harness.parse(build_parser(), argv)
    if flags.cell:
        with jax.default_device(device):
            print(json.dumps(list(run_cell(flags, flags.cell))))
        return
    report = harness.describe_run("benchmarks.ttt_e2e", argv, device) | {"steps": [], "reading": []}
    out = flags.out or harness.default_out("ttt_e2e", device)
    cells = [cell for part in flags.parts for cell in cells_of(part)]
    harness.run([harness.Task("reading" if cell == "reading" else "steps", cell,
                              functools.partial(in_own_process, argv, cell)) for cell in cells], report, out, device)
    print_report(report)
    if out:
        print(f"\nsaved {out}")


def cells_of(part: str) -> list[str]:
    """What --cell names: "reading", or "SEQUENCE-BATCH-ATTENTION"."""
    return [part] if part == "reading" else ["-".join(map(str, cell)) for cell in STEPS[part]]


def run_cell(flags: argparse.Namespace, cell: str) -> Iterator[Record]:
    """The records of one cell."""
    if cell == "reading":
        return measure_reading(flags)
    sequence, batch, attention = cell.split("-")
    return measure_step(flags, int(sequence), int(batch), attention)


def in_own_process(argv: Sequence[str], cell: str) -> list[Record]:
    """Runs one cell as a command of its own and reads the records that it prints last; none if it failed."""
    command = [sys.executable, "-m", "benchmarks.ttt_e2e", *argv, "--cell", cell]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{cell}: failed with status {done.returncode}, its messages are above", file=sys.stderr)
        return []
    return json.loads(done.stdout.splitlines()[-1])


def print_report(report: Record) -> None:
    """Prints a report, as it is saved, for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"\n{report['device']}, {report['date']}\n{versions}\n{report['command']}\n")
    if report["steps"]:
        print(harness.format_table(
            ("T", "batch", "attention", "loss", "gradient", "ms", "spread", "tokens/s", "peak", "temporary",
             "first call"),
            [(str(row["sequence"]), str(row["batch"]), row["attention"],
              harness.format_number(row["loss"], ".5f"), harness.format_number(row["gradient_norm"], ".4f"),
              row["failure"] or f"{row['milliseconds']:.1f}", "" if row["failure"] else f"{row['spread']:.1f}",
              "" if row["failure"] else f"{row['tokens_per_second']:,.0f}", harness.format_bytes(row["peak_bytes"]),
              harness.format_bytes(row["temporary_bytes"]),
              "" if row["failure"] else f"{row['first_call_seconds']:.0f} s") for row in report["steps"]]))
    if report["reading"]:
        print("\nmilliseconds per token after so many tokens\n" + harness.format_table(
            ("tokens", "prefill", "decode"),
            [(str(row["tokens"]), f"{row['prefill_ms_per_token']:.4f}", f"{row['decode_ms_per_token']:.3f}")
             for row in report["reading"]]))


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ttt_e2e", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=harness.one_of(*PARTS), default=list(PARTS), metavar="PART,PART",
        help=f"what to measure, of {', '.join(PARTS)} (default all)")
    parser.add_argument("--scale", type=harness.positive_int, default=1, help="divisor of all sizes, for a try-out")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    harness.add_run_flags(parser, iters=1, repeats=5, warmup=1)
    return parser


if __name__ == "__main__":
    main()
