"""The pictures of a sweep. Each line has a style and a marker of its own, so that grey is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.harness import Record

# {mode: (colour, line style, marker)}; colours from Okabe and Ito, which differ for everyone.
STYLES = {
    "math": ("#000000", "-", "o"),
    "flash": ("#D55E00", "-", "s"),
    "recompute": ("#0072B2", "--", "^"),
    "save_p": ("#009E73", "-.", "v"),
    "save_p_triton_bwd": ("#CC79A7", ":", "D"),
    "save_p_triton_full": ("#E69F00", (0, (5, 1, 1, 1, 1, 1)), "X"),
}


def times(run: Record, rows: Sequence[Record]) -> Figure:
    """Mean time of a meta-gradient by length, one panel for each mask."""
    figure = _panels(run, rows, draw_times)
    figure.axes[0].set_ylabel("time of a meta-gradient (ms)")
    return figure


def speedups(run: Record, rows: Sequence[Record]) -> Figure:
    """How many times faster than math each mode is, by length, one panel for each mask."""
    figure = _panels(run, rows, draw_speedups)
    figure.axes[0].set_ylabel("time of math / time of the mode (×)")
    return figure


def draw_times(axes: Axes, rows: Sequence[Record]) -> None:
    """The rows of one mask, by mode; error bars are standard deviations."""
    for mode, points in _by_mode(rows).items():
        axes.errorbar([row["t"] for row in points], [row["mean_ms"] for row in points],
                      yerr=[row["deviation_ms"] for row in points], capsize=2, **_style(mode))
    _logarithmic(axes, rows, ticks=(1, 2, 5))


def draw_speedups(axes: Axes, rows: Sequence[Record]) -> None:
    """The rows of one mask, by mode, over those of math."""
    by_mode = _by_mode(rows)
    math = {row["t"]: row["median_ms"] for row in by_mode.pop("math", [])}
    axes.axhline(1, color="black", linewidth=1)
    for mode, points in by_mode.items():
        both = [row for row in points if row["t"] in math]
        axes.plot([row["t"] for row in both], [math[row["t"]] / row["median_ms"] for row in both], **_style(mode))
    _logarithmic(axes, rows, ticks=(1, 1.5, 2, 3, 5, 7))


def save(figure: Figure, path: Path) -> None:
    """Writes a picture whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, format=path.suffix[1:], dpi=150)
    unfinished.replace(path)


def _panels(run: Record, rows: Sequence[Record], draw: Callable[[Axes, Sequence[Record]], None]) -> Figure:
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, causal in zip(panels, (False, True), strict=True):
        axes.set_title("causal" if causal else "not causal", fontsize=10)
        draw(axes, [row for row in rows if row["causal"] == causal])
        failed = [f"{row['mode']} at {row['t']}: {row['failure']}" for row in rows
                  if row["causal"] == causal and row["failure"]]
        if failed:
            axes.set_xlabel(f"{axes.get_xlabel()}\n" + "\n".join(failed))
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda x: len(x[1]))
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9,
                      handlelength=3.5)
    figure.suptitle(f"{run['device']}, {run['problem']}, {run['date'][:10]}", fontsize=11)
    return figure


def _by_mode(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """The rows that have a time, by mode, each by length."""
    by_mode: dict[str, list[Record]] = {}
    for row in sorted(rows, key=lambda row: row["t"]):
        if row["median_ms"]:
            by_mode.setdefault(row["mode"], []).append(row)
    return by_mode


def _style(mode: str) -> Record:
    colour, line, marker = STYLES[mode]
    return {"label": mode, "color": colour, "linestyle": line, "marker": marker, "markersize": 5, "linewidth": 1.5}


def _logarithmic(axes: Axes, rows: Sequence[Record], ticks: Sequence[float]) -> None:
    """Both axes, with plain numbers: the lengths there are, and `ticks` of each decade."""
    lengths = sorted({row["t"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_xticks(lengths, [str(t) for t in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)
