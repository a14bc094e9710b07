"""Train a transformer to learn from what it reads, and see its loss fall along a sequence.

The data are the bytes of files. In mode "ttt" the model reads a sequence through a sliding window,
chunk by chunk; after each chunk the fast MLPs of its last blocks take a gradient step on the chunk's
loss, and training minimises the loss of the whole sequence through those steps. Modes "window" and
"full" are the same model, without steps, behind the same window or none.

Training runs on every GPU that JAX sees, a share of each batch on each. It leaves config.json,
metrics.csv, checkpoints, loss_by_position.csv and curves.png in the folder --out; run again, the same
command goes on from the last checkpoint to the very numbers of a run that was never stopped.

    python -m examples.ttt_e2e.train --config tiny
    python -m examples.ttt_e2e.train --config small --mode window --data ~/books
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from examples.ttt_e2e import checkpoints, data, model, report
from examples.ttt_e2e.checkpoints import Record
from examples.ttt_e2e.model import Config, Weights


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
      batch: sequences in a step.
      steps: steps of AdamW, with a warm-up of a tenth of them and a cosine decay to a tenth.
      learning_rate: at the end of the warm-up.
      seed: of the weights and of the passages drawn.
    """

    batch: int
    steps: int
    learning_rate: float
    seed: int = 0


PRESETS: dict[str, tuple[Config, Training]] = {
    "tiny": (
        Config(layers=4, width=64, heads=2, hidden=176, sequence=512, chunk=32, window=64, dtype="float32"),
        Training(batch=4, steps=200, learning_rate=5e-3)),
    "small": (
        Config(layers=8, width=512, heads=8, hidden=1408, sequence=8192, chunk=512, window=1024),
        Training(batch=16, steps=400, learning_rate=3e-3)),
    "base": (
        Config(layers=12, width=768, heads=12, hidden=2048, sequence=8192, chunk=512, window=1024),
        Training(batch=16, steps=3000, learning_rate=2e-3)),
}


class State(NamedTuple):
    """What training carries from step to step."""

    weights: Weights
    optimizer: optax.OptState


class Diverged(Exception):
    """A loss, a gradient or weights that are no numbers."""


# One step, on all devices.


def outer_optimizer(training: Training) -> optax.GradientTransformation:
    """AdamW with clipped gradients; gains of norms do not decay."""
    peak = training.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, training.steps // 10), training.steps, 0.1 * peak)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1,
                    mask=lambda weights: jax.tree.map_with_path(
                        lambda path, _: not str(path[-1].key).endswith("_norm"), weights)))


def norm(tree: Any) -> jax.Array:
    """Euclidean norm of all numbers in a tree."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def data_mesh(devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """These devices, by default all, along one axis over which batches are sharded."""
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def make_step(config: Config, training: Training, mesh: jax.sharding.Mesh, **options: Any
              ) -> Callable[[State, jax.Array], tuple[State, Record]]:
    """A jitted step: the next state, and a record of the step as arrays, but for its number."""
    optimizer = outer_optimizer(training)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def gradient(weights: Weights, tokens: jax.Array) -> tuple[jax.Array, Weights]:
        def loss(weights: Weights) -> jax.Array:
            return jnp.mean(model.batch_losses(weights, tokens.astype(jnp.int32), config, **options))

        return jax.lax.pmean(jax.value_and_grad(loss)(weights), "data")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, tokens: jax.Array) -> tuple[State, Record]:
        loss, direction = gradient(state.weights, tokens)
        updates, optimizer_state = optimizer.update(direction, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        record = Record(0, loss / np.log(2), norm(direction), norm(weights))
        return State(weights, optimizer_state), record

    return step


def start_state(config: Config, training: Training, mesh: jax.sharding.Mesh) -> State:
    """The state before the first step, a copy on every device."""
    weights = model.init_weights(config, training.seed)
    return jax.device_put(State(weights, outer_optimizer(training).init(weights)), NamedSharding(mesh, P()))


# The run.


def train(config: Config, training: Training, corpus: data.Corpus, out: Path, save_every: int, resumable: bool
          ) -> Weights:
    """Trains from the last checkpoint in `out`, or from the start, and returns the weights.

    Raises:
      Diverged: a loss, a gradient or the weights were no finite numbers. The last checkpoint is from before.
    """
    mesh = data_mesh()
    state = start_state(config, training, mesh)
    store = checkpoints.Checkpoints(out) if resumable else None
    done = 0
    if store and store.latest() is not None:
        state, done = store.restore(state), store.latest()
        print(f"going on from step {done}")
    records = checkpoints.read_records(out, done)
    step_of = make_step(config, training, mesh)
    sharding = NamedSharding(mesh, P("data"))
    meter = report.Meter(config, training.batch)

    def settle(step: int, record: Record) -> None:
        """Waits for a step's numbers and looks at them."""
        record = Record(step, *map(float, record[1:]))
        if not all(map(math.isfinite, record)):
            raise Diverged(f"step {step}: {record}: expected finite numbers")
        records.append(record)
        progress.set_description("training", refresh=False)
        progress.set_postfix_str(f"{record.loss:.3f} bits/byte, {meter.read()}")

    pending = None
    try:
        with tqdm(total=training.steps, initial=done, desc="compiling", unit="step") as progress:
            for step in range(done + 1, training.steps + 1):
                tokens = data.batch(corpus.training, config.sequence + 1, training.batch, training.seed, step)
                state, record = step_of(state, jax.device_put(tokens, sharding))
                # Look at the step before, so that the devices have work while the host waits.
                if pending:
                    settle(*pending)
                pending = step, record
                if step % save_every == 0 or step == training.steps:
                    settle(*pending)
                    pending = None
                    checkpoints.write_records(out, records)
                    if store:
                        store.save(step, state)
                progress.update()
    finally:
        checkpoints.write_records(out, records)
        if store:
            store.close()
    return state.weights


def evaluate(config: Config, weights: Weights, documents: Sequence[np.ndarray], batch: int, limit: int) -> np.ndarray:
    """Bits per byte at each position `[sequence]`, the mean over passages of held-out documents."""
    mesh = data_mesh()
    losses = jax.jit(jax.shard_map(
        lambda weights, tokens: model.batch_losses(weights, tokens.astype(jnp.int32), config),
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False))
    passages = data.passages(documents, config.sequence + 1, limit)
    filled = np.resize(passages, (-(-len(passages) // batch) * batch, passages.shape[1]))
    parts = [np.asarray(losses(weights, filled[i:i + batch]))
             for i in tqdm(range(0, len(filled), batch), desc="evaluating", unit="batch")]
    return np.concatenate(parts)[:len(passages)].mean(axis=0) / np.log(2)


# The command.


# Fields of a preset that have a flag, and what it says.
OVERRIDES: tuple[dict[str, str], dict[str, str]] = ({
    "sequence": "bytes that a training sequence predicts, a multiple of --chunk",
    "chunk": "bytes between two steps of the fast MLPs",
    "window": "bytes that attention reaches, at least --chunk",
    "layers": "blocks, of which the last quarter learn while reading",
    "width": "of the blocks, an even multiple of --heads",
    "heads": "of attention in each block",
    "hidden": "width inside of the MLPs",
    "inner_lr": "learning rate of the fast MLPs, their gradient being clipped to norm 1",
    "checkpoint_every": "chunks to compute again together in a gradient",
}, {
    "batch": "sequences in a step, a multiple of the devices",
    "steps": "steps of training",
    "learning_rate": "highest learning rate of AdamW",
    "seed": "of the weights and of the passages drawn",
})


def add_preset_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each of `OVERRIDES`, with the presets' values in its help."""
    group = parser.add_argument_group("in place of the config's own", "defaults are those of " + ", ".join(PRESETS))
    for part, texts in enumerate(OVERRIDES):
        for field, text in texts.items():
            values = [getattr(preset[part], field) for preset in PRESETS.values()]
            group.add_argument(f"--{field.replace('_', '-')}", type=type(values[0]), metavar="N",
                               help=f"{text} ({', '.join(map(str, values))})")


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = report.teaching_parser("train", __doc__)
    add = parser.add_argument
    add("--config", choices=PRESETS, default="tiny", help="sizes: tiny for a CPU, small and base for a GPU")
    add("--mode", choices=model.MODES, default="ttt", help="what reads: learning through a window, the window alone, "
        "or attention to everything")
    add("--data", nargs="+", type=Path, default=[data.STANDARD_LIBRARY], metavar="PATH",
        help="files, or folders of files, text or not (default: the Python standard library)")
    add("--out", type=Path, metavar="FOLDER", help="default: runs/ttt_e2e/CONFIG-MODE")
    add("--no-checkpoint", action="store_true", help="write no checkpoints and resume from none; needs no orbax")
    add("--save-every", type=int, default=50, metavar="N", help="steps between checkpoints (default 50)")
    add("--held-out", type=int, default=128, metavar="N", help="passages of held-out files to evaluate on, at most "
        "(default 128)")
    add_preset_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, evaluates, reports; the exit status is 1 for a loss that is no number and 130 if interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def overridden(preset: Any) -> Any:
        given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(preset)}
        return dataclasses.replace(preset, **{name: value for name, value in given.items() if value is not None})

    config, training = map(overridden, PRESETS[args.config])
    out = args.out or Path("runs/ttt_e2e") / f"{args.config}-{args.mode}"
    try:
        config.check()
        if training.batch < 1 or training.batch % jax.device_count():
            raise ValueError(f"batch was {training.batch}: expected at least 1 and a multiple of the devices, "
                             f"{jax.device_count()}")
        if not 0 < training.learning_rate < math.inf:
            raise ValueError(f"learning-rate was {training.learning_rate}: expected a finite number over 0")
        for name, value in (("steps", training.steps), ("held-out", args.held_out), ("save-every", args.save_every)):
            if value < 1:
                raise ValueError(f"{name} was {value}: expected at least 1")
        corpus = data.load(args.data, config.sequence + 1)
        if checkpoints.orbax is None and not args.no_checkpoint:
            raise ValueError(checkpoints.MISSING_ORBAX)
        out.mkdir(parents=True, exist_ok=True)
        checkpoints.write_config(out, config, dataclasses.asdict(training), [str(x) for x in args.data])
    except (OSError, ValueError) as error:
        parser.error(str(error))

    started = time.monotonic()
    try:
        weights = train(config, training, corpus, out, args.save_every, resumable=not args.no_checkpoint)
        trained = time.monotonic()
        losses = evaluate(config, weights, corpus.held_out, training.batch, args.held_out)
    except Diverged as error:
        print(f"stopped at {error}. The last checkpoint in {out} is from before; a lower --learning-rate or --inner-lr "
              "may help, with another --out", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from the last checkpoint in {out}", file=sys.stderr)
        return 130
    report.write_run(out, losses, checkpoints.read_records(out, training.steps))
    print(f"trained {trained - started:.0f} s, {model.parameter_count(weights):,} weights, "
          f"{training.steps * training.batch * config.sequence:,} tokens")
    print(report.table({out.name: losses}))
    print(f"wrote loss_by_position.csv and curves.png in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
