"""Meta-learn weights that a few SGD steps adapt to the document being read.

A task is a passage of one file, cut into chunks of bytes. An inner loop takes one `optax.sgd` step
on each chunk but the last, starting from the meta-learned weights; the adapted weights then predict
the last chunk. Attention never reaches beyond a chunk, so all that the last one profits from the
earlier ones has passed through the inner gradients. The outer optimiser, `optax.adamw`, follows the
loss on the last chunk through those gradients: the gradient of a gradient of attention.

    python examples/optax_inner_loop.py
    python examples/optax_inner_loop.py --attention jax --inner-steps 8 --data README.md docs/
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import io
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import jttt

type Attention = Callable[..., jax.Array]
type Weights = dict[str, Any]
type Losses = tuple[jax.Array, jax.Array]
type PassageLosses = Callable[[Weights, jax.Array], Losses]

ATTENTIONS: dict[str, Attention] = {
    "auto": jttt.dot_product_attention,
    "triton": functools.partial(jttt.dot_product_attention, implementation="triton"),
    "xla": functools.partial(jttt.dot_product_attention, implementation="xla"),
    "jax": jax.nn.dot_product_attention,
}

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

# Tests and codecs are tables more than text, and would flatter adaptation; what is installed beside
# the standard library differs from machine to machine.
SKIPPED_IN_STANDARD_LIBRARY = {"test", "tests", "encodings", "site-packages", "dist-packages"}

HELD_OUT_SHARE = 0.1
EVALUATION_BATCH = 16
STEPS_BETWEEN_SAVES = 10


class Record(NamedTuple):
    """One outer step: bits per byte on its tasks before and after adaptation, and the time since the start."""

    step: int
    loss_before: float
    loss_after: float
    seconds: float


# The data.


def is_source(name: Path) -> bool:
    """Whether a file of the standard library, named from its root, is one to learn from."""
    return name.suffix == ".py" and SKIPPED_IN_STANDARD_LIBRARY.isdisjoint(name.parts)


def is_visible(name: Path) -> bool:
    """Whether a file of a folder the user gave, named from that folder, is neither hidden nor byte code."""
    return not any(part.startswith((".", "__pycache__")) for part in name.parts)


def list_files(paths: Sequence[Path]) -> dict[Path, str]:
    """The files at `paths`, folders searched in sorted order, each with its name relative to its folder."""
    files = {}
    for path in paths:
        if not path.is_dir():
            files[path] = path.name
            continue
        wanted = is_source if path == STANDARD_LIBRARY else is_visible
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path)
            if file.is_file() and wanted(name):
                files[file] = name.as_posix()
    return files


def cut_passages(document: bytes, chunks: int, chunk_size: int) -> np.ndarray:
    """Cut a document into passages, `[passage, chunk, chunk_size + 1]`, dropping what is left at its end.

    Each chunk holds one byte more than it predicts: its first byte, the last of the chunk before it,
    is only read.
    """
    if len(document) <= chunks * chunk_size:
        return np.empty((0, chunks, chunk_size + 1), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(document, np.uint8), chunk_size + 1)
    windows = windows[::chunk_size]
    passages = len(windows) // chunks
    return windows[: passages * chunks].reshape(passages, chunks, chunk_size + 1)


def load_passages(paths: Sequence[Path], chunks: int, chunk_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the documents that hold at least one passage: the passages to train on, and those held out.

    Files are held out whole. A hash of their names chooses them, so that neither the seed nor the
    place where the files lie matters.
    """
    files = list_files(paths)
    documents = {file: cut_passages(file.read_bytes(), chunks, chunk_size) for file in files}
    usable = [file for file in files if len(documents[file])]
    if len(usable) < 2:
        raise ValueError(
            f"need two files or more of at least {chunks * chunk_size + 1} bytes, one of them to hold out; "
            f"{len(usable)} of the {len(files)} files at {', '.join(map(str, paths))} are that long"
        )
    usable.sort(key=lambda file: hashlib.sha256(files[file].encode()).digest())
    held_out = max(1, round(HELD_OUT_SHARE * len(usable)))
    shuffled = [documents[file] for file in usable]
    return np.concatenate(shuffled[held_out:]), np.concatenate(shuffled[:held_out])


# The model: a small causal transformer over bytes.


def init_weights(random: np.random.Generator, layers: int, width: int, heads: int) -> Weights:
    """Draw the weights; matrices keep the variance of what they multiply, and each layer starts small."""

    def normal(*shape: int, variance: float) -> jax.Array:
        return jnp.asarray(random.normal(scale=variance**0.5, size=shape), jnp.float32)

    def init_layer() -> Weights:
        head = width // heads
        return {
            "attention_norm": jnp.ones(width),
            "query_key_value": normal(3, width, heads, head, variance=1 / width),
            "attention_out": normal(heads, head, width, variance=1 / (2 * layers * width)),
            "mlp_norm": jnp.ones(width),
            "mlp_in": normal(width, 4 * width, variance=1 / width),
            "mlp_out": normal(4 * width, width, variance=1 / (8 * layers * width)),
        }

    return {
        "embedding": normal(256, width, variance=0.05**2),
        "layers": [init_layer() for _ in range(layers)],
        "final_norm": jnp.ones(width),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale each vector to a root mean square of one, then each entry by its gain."""
    return gain * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) for queries or keys `[time, heads, head]`."""
    time, _, head = x.shape
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, head // 2, endpoint=False)
    angles = jnp.arange(time)[:, None, None] * frequencies
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def predict(weights: Weights, read: jax.Array, attention: Attention) -> jax.Array:
    """Logits `[time, 256]` of the byte that follows each of the bytes `[time]` read."""
    x = weights["embedding"][read]
    for layer in weights["layers"]:
        normed = rms_norm(x, layer["attention_norm"])
        query, key, value = jnp.einsum("td,cdnh->ctnh", normed, layer["query_key_value"])
        mixed = attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + jnp.einsum("tnh,nhd->td", mixed, layer["attention_out"])
        normed = rms_norm(x, layer["mlp_norm"])
        x = x + jax.nn.gelu(normed @ layer["mlp_in"]) @ layer["mlp_out"]
    return rms_norm(x, weights["final_norm"]) @ weights["embedding"].T


# The inner loop and the outer one.


def chunk_loss(weights: Weights, chunk: jax.Array, attention: Attention) -> jax.Array:
    """Bits per byte of a chunk: how well each byte is predicted from the chunk up to it."""
    logits = predict(weights, chunk[:-1], attention)
    return optax.softmax_cross_entropy_with_integer_labels(logits, chunk[1:]).mean() / jnp.log(2.0)


def adapt(weights: Weights, chunks: jax.Array, attention: Attention, inner: optax.GradientTransformation) -> Weights:
    """The inner loop: one step of the optimiser `inner` on each of `chunks`, in order."""

    def step(carry: tuple[Weights, optax.OptState], chunk: jax.Array) -> tuple[tuple[Weights, optax.OptState], None]:
        weights, state = carry
        gradient = jax.grad(chunk_loss)(weights, chunk, attention)
        updates, state = inner.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(step, (weights, inner.init(weights)), chunks)
    return weights


def task_losses(
    weights: Weights, passage: jax.Array, attention: Attention, inner: optax.GradientTransformation
) -> Losses:
    """Loss on a passage's last chunk: of the weights as they are, and adapted to the chunks before."""
    passage = passage.astype(jnp.int32)
    before = chunk_loss(weights, passage[-1], attention)
    after = chunk_loss(adapt(weights, passage[:-1], attention, inner), passage[-1], attention)
    return before, after


@functools.partial(jax.jit, static_argnames=("losses", "outer"))
def outer_step(
    weights: Weights,
    state: optax.OptState,
    passages: jax.Array,
    losses: PassageLosses,
    outer: optax.GradientTransformation,
) -> tuple[Weights, optax.OptState, Losses]:
    """One step of the optimiser `outer` down the mean loss after adaptation; both mean losses before the step."""

    def outer_loss(weights: Weights) -> tuple[jax.Array, Losses]:
        before, after = jax.vmap(functools.partial(losses, weights))(passages)
        return after.mean(), (before.mean(), after.mean())

    gradient, means = jax.grad(outer_loss, has_aux=True)(weights)
    updates, state = outer.update(gradient, state, weights)
    return optax.apply_updates(weights, updates), state, means


@functools.partial(jax.jit, static_argnames="losses")
def evaluate(weights: Weights, passages: jax.Array, losses: PassageLosses) -> Losses:
    """Mean losses over `passages`, before and after adaptation."""
    before, after = jax.lax.map(functools.partial(losses, weights), passages, batch_size=EVALUATION_BATCH)
    return before.mean(), after.mean()


# What is left behind.


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is at every moment either the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def save_metrics(path: Path, records: Sequence[Record]) -> None:
    """Write the records as CSV, losses in bits per byte."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Record._fields)
    for step, before, after, seconds in records:
        writer.writerow([step, f"{before:.6f}", f"{after:.6f}", f"{seconds:.2f}"])
    write_atomically(path, text.getvalue().encode())


def save_curves(path: Path, records: Sequence[Record]) -> None:
    """Draw both losses over the outer steps: each step pale, the running mean of a tenth of them dark."""
    steps, before, after, _ = np.array(records).T
    window = max(1, len(records) // 10)
    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="outer step", ylabel="training loss (bits per byte)")
    for losses, label, color, style in (
        (before, "before adaptation", "tab:orange", "--"),
        (after, "after adaptation", "tab:blue", "-"),
    ):
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps[window - 1 :], mean, style, color=color, label=label)
    axes.set_title(f"Each step, and the mean of the last {window}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())


# The command.


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def positive(text: str) -> int:
    """An argument's value: a whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than one")
    return number


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    description, example = __doc__.split("\n\n    ", 1)
    parser = argparse.ArgumentParser(
        description=description,
        epilog="examples:\n    " + example,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--data", nargs="+", default=[str(STANDARD_LIBRARY)], metavar="PATH",
        help="files, or folders of files, to learn from")
    add("--out", type=Path, default=Path("runs/optax_inner_loop"), metavar="FOLDER",
        help="where metrics.csv and curves.png go")
    add("--attention", choices=ATTENTIONS, default="auto",
        help="jttt, which picks its implementation itself (auto) or is told which (triton, xla); "
             "or jax.nn.dot_product_attention (jax)")
    add("--steps", type=positive, default=200, help="outer steps")
    add("--batch", type=positive, default=4, help="passages in an outer step")
    add("--inner-steps", type=positive, default=4, help="chunks of a passage to adapt to, one SGD step each")
    add("--chunk", type=positive, default=128, help="bytes predicted in a chunk")
    add("--layers", type=positive, default=2, help="layers of the transformer")
    add("--width", type=positive, default=96, help="width of the transformer, an even number times --heads")
    add("--heads", type=positive, default=3, help="attention heads in a layer")
    add("--inner-lr", type=float, default=0.05, help="learning rate of the inner SGD")
    add("--outer-lr", type=float, default=3e-3, help="peak learning rate of the outer AdamW")
    add("--held-out", type=positive, default=256, help="passages of held-out files to evaluate on, at most")
    add("--seed", type=int, default=0, help="of the weights, the order of training, and the held-out passages")
    return parser


def learn(
    args: argparse.Namespace, passages: np.ndarray, held_out: np.ndarray, records: list[Record]
) -> tuple[float, float]:
    """Train on `passages`, adding to `records` and saving them; the mean losses on `held_out` at the end."""
    random = np.random.default_rng(args.seed)
    held_out = random.permutation(held_out)[: args.held_out]
    weights = init_weights(random, args.layers, args.width, args.heads)
    losses = functools.partial(task_losses, attention=ATTENTIONS[args.attention], inner=optax.sgd(args.inner_lr))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.outer_lr, warmup_steps=args.steps // 10, decay_steps=args.steps, end_value=0.05 * args.outer_lr
    )
    outer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    state = outer.init(weights)
    start = time.perf_counter()
    with tqdm(range(1, args.steps + 1), desc="compiling", unit="step") as progress:
        for step in progress:
            drawn = passages[random.integers(len(passages), size=args.batch)]
            weights, state, (before, after) = outer_step(weights, state, drawn, losses, outer)
            records.append(Record(step, float(before), float(after), time.perf_counter() - start))
            if step % STEPS_BETWEEN_SAVES == 0:
                save_metrics(args.out / "metrics.csv", records)
            progress.set_description("bits per byte", refresh=False)
            progress.set_postfix(before=f"{before:.2f}", after=f"{after:.2f}")
    before, after = evaluate(weights, held_out, losses)
    return float(before), float(after)


def main() -> int:
    """Train, evaluate, report; the exit status is 130 if interrupted."""
    parser = make_parser()
    args = parser.parse_args()
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} is not an even number times --heads {args.heads}")
    try:
        passages, held_out = load_passages([Path(path) for path in args.data], args.inner_steps + 1, args.chunk)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    records: list[Record] = []
    try:
        before, after = learn(args, passages, held_out, records)
        print(f"bits per byte on passages of held-out files\n"
              f"  without adaptation  {before:6.3f}\n"
              f"  with adaptation     {after:6.3f}\n"
              f"  difference          {after - before:+6.3f}")
        return 0
    except KeyboardInterrupt:
        print(f"interrupted after {len(records)} of {args.steps} steps")
        return 130
    finally:
        if records:
            save_metrics(args.out / "metrics.csv", records)
            save_curves(args.out / "curves.png", records)
            print(f"wrote metrics.csv and curves.png in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
