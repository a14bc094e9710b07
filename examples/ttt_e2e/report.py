"""What people see: a parser that teaches, a progress meter, tables and pictures."""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import time
from collections import deque
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from examples.ttt_e2e import checkpoints, model
from examples.ttt_e2e.checkpoints import Record

# Dense bfloat16 products, operations a second, from the makers' data sheets.
_PEAK = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}

_COLORS = {"ttt": "tab:blue", "window": "tab:orange", "full": "tab:green"}


def teaching_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of one of the commands, with its module's docstring as help, the indented examples at the end."""
    text, examples = description.rsplit("\n\n    ", 1)
    return argparse.ArgumentParser(prog=f"python -m examples.ttt_e2e.{command}", description=text,
                                   epilog="examples:\n    " + examples,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


class Meter:
    """Tokens a second over the last steps, and what share of the devices' peak that is."""

    def __init__(self, config: model.Config, batch: int):
        self._tokens = batch * config.sequence
        self._operations = model.training_operations(config)
        kind = jax.devices()[0].device_kind
        self._peak = next((peak for name, peak in _PEAK.items() if name in kind), None)
        self._times = deque(maxlen=20)

    def read(self) -> str:
        """Called once a step: a few words for the progress bar."""
        self._times.append(time.perf_counter())
        if len(self._times) < 2:
            return ""
        rate = self._tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0])
        if self._peak is None:
            return f"{rate:,.0f} tokens/s"
        return f"{rate:,.0f} tokens/s, MFU {rate * self._operations / self._peak / jax.device_count():.1%}"


def binned(losses: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges `[bins + 1]` of equal stretches of positions, and the mean loss of each `[bins]`."""
    edges = np.linspace(0, len(losses), bins + 1).astype(int)
    return edges, np.array([losses[a:b].mean() for a, b in itertools.pairwise(edges)])


def table(runs: dict[str, np.ndarray]) -> str:
    """Bits per byte in eighths of the sequence, a row for each stretch and a column for each run."""
    columns = {name: binned(losses, 8) for name, losses in runs.items()}
    edges = next(iter(columns.values()))[0]
    names = [f"{name:>14}" for name in runs]
    lines = ["bits per byte on held-out files, by position", f"{'position':>15} " + " ".join(names)]
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        lines.append(f"{a:>7}–{b - 1:<7} " + " ".join(f"{means[i]:14.4f}" for _, means in columns.values()))
    lines.append(f"{'all':>15} " + " ".join(f"{losses.mean():14.4f}" for losses in runs.values()))
    return "\n".join(lines)


def write_run(folder: Path, losses: np.ndarray, records: list[Record]) -> None:
    """Writes loss_by_position.csv, and curves.png: the training loss and the loss by position."""
    checkpoints.write_csv(folder / "loss_by_position.csv", ("position", "loss"),
                          [(i, f"{x:.5f}") for i, x in enumerate(losses)])
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([r.step for r in records], [r.loss for r in records], linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss (bits per byte)")
    draw_by_position(right, {folder.name: losses})
    save(figure, folder / "curves.png")


def read_losses(folder: Path) -> np.ndarray:
    """The bits per byte at each position that a finished run left."""
    path = folder / "loss_by_position.csv"
    if not path.exists():
        raise ValueError(f"{folder} has no loss_by_position.csv: expected the folder of a finished run")
    with path.open(newline="") as file:
        return np.array([float(row["loss"]) for row in csv.DictReader(file)])


def draw_by_position(axes, runs: dict[str, np.ndarray]) -> None:
    """Draws the mean loss of each of 32 stretches of the sequence."""
    for name, losses in runs.items():
        edges, means = binned(losses, min(32, len(losses)))
        color = _COLORS.get(name.rsplit("-", 1)[-1])
        axes.plot((edges[:-1] + edges[1:]) / 2, means, marker=".", color=color, label=name)
    axes.set(xlabel="position in the sequence (bytes)", ylabel="held-out loss (bits per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure, atomically."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    checkpoints.write_atomically(path, png.getvalue())
