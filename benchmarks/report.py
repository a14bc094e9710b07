"""One page, as a PDF, of what was measured: what jttt is, its chain of rules, pictures, a table, the commands.

    python -m benchmarks.report                                     # benchmarks/results/report-GPU.pdf
    python -m benchmarks.report --gpu nvidia-h200 --out report.pdf

Everything on it comes from the files in --results: gradgrad-GPU.json, gradgrad-long-GPU.json if it is there,
and every sweep*-GPU.csv (of these the first two are drawn). Nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from tqdm import tqdm

import jttt
from benchmarks import harness, plots, sweep
from benchmarks.harness import Record

WIDTH, HEIGHT = 8.27, 11.69  # A4, in inches
MARGIN = 0.6
LINE = 1.28  # distance of lines, in sizes of the font

WHAT = """\
Attention for JAX that can be differentiated twice (and more) at flash-attention speed and memory. Test-time training,
MAML, gradient penalties and Hessian-vector products differentiate through gradients, which other fast attention kernels
refuse. jttt gives the backward kernels a derivative of their own, made of kernels too: the value, the gradient and the
meta-gradient (the gradient of a function of the gradient) take memory linear in the sequence length."""


class Results(NamedTuple):
    """What was found of one GPU: reports of gradgrad, and sweeps as `sweep.from_csv` returns them."""

    gradgrad: list[Record]
    sweeps: list[tuple[Record, list[Record]]]

    @property
    def commands(self) -> list[str]:
        """What repeats them."""
        return [run["command"] for run in [*self.gradgrad, *(run for run, _ in self.sweeps)]]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page."""
    parser = build_parser()
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)
    gpu = flags.gpu or newest_gpu(flags.results)
    if gpu is None:
        parser.error(f"argument --results: no gradgrad-GPU.json in {flags.results}; run python -m benchmarks.gradgrad")
    if not (flags.results / f"gradgrad-{gpu}.json").exists():
        parser.error(f"argument --gpu: no gradgrad-{gpu}.json in {flags.results}")
    out = flags.out or flags.results / f"report-{gpu}.pdf"
    steps = tqdm(total=3, bar_format="{n_fmt}/{total_fmt} |{bar:20}| {desc}")
    with steps:
        steps.set_description_str("reading")
        results = read(flags.results, gpu)
        steps.update()
        steps.set_description_str("drawing")
        figure = page(results)
        steps.update()
        steps.set_description_str("writing")
        save(figure, out)
        steps.update()
    print(f"saved {out}")


def newest_gpu(folder: Path) -> str | None:
    """The GPU whose `gradgrad` was run last, as its files are named."""
    found = {path: json.loads(path.read_text())["date"] for path in folder.glob("gradgrad-*.json")
             if not path.name.startswith("gradgrad-long-")}
    return max(found, key=found.__getitem__).stem.removeprefix("gradgrad-") if found else None


def read(folder: Path, gpu: str) -> Results:
    """All that there is of one GPU."""
    reports = [folder / f"gradgrad-{gpu}.json", folder / f"gradgrad-long-{gpu}.json"]
    return Results([json.loads(path.read_text()) for path in reports if path.exists()],
                   [sweep.from_csv(path.read_text()) for path in sorted(folder.glob(f"sweep*-{gpu}.csv"))])


def page(results: Results) -> Figure:
    """The page, from the top down."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    run = results.gradgrad[0]
    top = write(figure, f"jttt {jttt.__version__}", 0.45, size=16, weight="bold")
    top = write(figure, WHAT, top + 0.06, size=8)
    top = write(figure, chain_of_rules(), top + 0.12, size=6.2, family="monospace")

    panels = _panels(results)
    plot_height, below = 1.5, 0.4  # of the axes, and of what is written under them
    for row in range(0, len(panels), 2):
        top += 0.28
        for column, panel in enumerate(panels[row:row + 2]):
            width = (WIDTH - 2 * MARGIN - 0.55) / 2
            left = MARGIN + 0.45 + column * (width + 0.1)
            axes = figure.add_axes((left / WIDTH, 1 - (top + plot_height) / HEIGHT, (width - 0.5) / WIDTH,
                                    plot_height / HEIGHT))
            panel(axes)
        top += plot_height + below
    axes = figure.axes[0]
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=6, frameon=False, fontsize=6.5,
                  bbox_to_anchor=(0.5, 1 - top / HEIGHT), borderpad=0, handlelength=4)

    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    caption = f"{_problem(run)}: medians of one run\n{run['device']}, {run['date'][:10]}, {versions}"
    top = write(figure, caption, top + 0.3, size=7, weight="bold")
    top = write(figure, table(results.gradgrad), top + 0.04, size=6.2, family="monospace")
    top = write(figure, "Commands that repeat this", top + 0.1, size=8, weight="bold")
    write(figure, "\n".join(map(_wrapped, [*results.commands, "python -m benchmarks.report"])), top + 0.02, size=5.4,
          family="monospace")
    return figure


def write(figure: Figure, text: str, top: float, size: float, **style: Any) -> float:
    """Text whose first line begins so many inches below the top of the page; returns where it ends."""
    figure.text(MARGIN / WIDTH, 1 - top / HEIGHT, text, fontsize=size, va="top", linespacing=LINE, **style)
    return top + (text.count("\n") + 1) * size * LINE / 72


def chain_of_rules() -> str:
    """The diagram of the design notes."""
    design = (Path(jttt.__file__).parent / "DESIGN.md").read_text()
    return re.search(r"## The chain of rules\n.*?```\n(.*?)\n```", design, re.DOTALL).group(1)


def table(reports: Sequence[Record]) -> str:
    """Times and memory of jttt and of XLA's attention, and their ratio."""
    cells = {(row["shape"]["t"], row["pass"], row["implementation"]): row
             for report in reports for row in report["results"]}
    rows = []
    for t, name in dict.fromkeys(key[:2] for key in cells):
        ours, xla = (cells.get((t, name, implementation)) for implementation in ("triton", "xla"))
        times = [row["milliseconds"] if row else None for row in (ours, xla)]
        rows.append((str(t), name, *(f"{x:.2f} ms" if x else "not run" if row is None else row["failure"]
                                     for x, row in zip(times, (ours, xla), strict=True)),
                     f"{times[1] / times[0]:.1f}x" if all(times) else "",
                     *(harness.format_bytes(row["temporary_bytes"]) if row else "" for row in (ours, xla))))
    return harness.format_table(
        ("T", "pass", "jttt", "XLA", "speed-up", "temporary memory: jttt", "XLA"), rows)


def save(figure: Figure, path: Path) -> None:
    """Writes the page whole or not at all, and the same bytes for the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with PdfPages(unfinished, metadata={"Title": "jttt", "CreationDate": None}) as pdf:
        pdf.savefig(figure)
    unfinished.replace(path)


def _panels(results: Results) -> list[Any]:
    """Functions that draw into axes: two for each of the first two sweeps, or two of gradgrad where there is none."""
    def titled(draw: Any, rows: list[Record], title: str, label: str) -> Any:
        def panel(axes: Axes) -> None:
            draw(axes, rows)
            axes.set_title(title, fontsize=6.5)
            axes.set_ylabel(label, fontsize=6.5)
            axes.xaxis.label.set_size(6.5)
            axes.tick_params(labelsize=5.5)
            for line in axes.get_lines():
                line.set(markersize=3, linewidth=1)

        return panel

    panels = []
    for run, rows in results.sweeps[:2]:
        causal = [row for row in rows if row["causal"]]
        title = f"meta-gradient, causal, {run['problem']}"
        panels += [titled(plots.draw_times, causal, title, "time (ms)"),
                   titled(plots.draw_speedups, causal, title, "speed-up over math (×)")]
    if not panels:
        rows = [{"t": row["shape"]["t"], "mode": {"triton": "flash", "xla": "math"}[row["implementation"]],
                 "mean_ms": row["milliseconds"], "median_ms": row["milliseconds"], "deviation_ms": 0}
                for report in results.gradgrad for row in report["results"] if row["pass"] == "meta-gradient"]
        title = f"meta-gradient, {_problem(results.gradgrad[0])}"
        panels = [titled(plots.draw_times, rows, title, "time (ms)"),
                  titled(plots.draw_speedups, rows, title, "speed-up over math (×)")]
    return panels


def _problem(run: Record) -> str:
    """What a report of gradgrad was measured on, but for the length."""
    row = run["results"][0]
    sizes = " ".join(f"{axis.upper()}={size}" for axis, size in row["shape"].items() if axis != "t")
    return f"{sizes} {row['dtype']}" + (" causal" if row["causal"] else "")


def _wrapped(command: str) -> str:
    return " \\\n".join(textwrap.wrap(command, 135, subsequent_indent="    ", break_on_hyphens=False))


def build_parser() -> argparse.ArgumentParser:
    """The command line; its description is this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, metavar="FOLDER",
                        help="where the results lie (default: benchmarks/results)")
    parser.add_argument("--gpu", help="which GPU's, as in the names of the files (default: the one measured last)")
    parser.add_argument("--out", type=Path, metavar="FILE.pdf",
                        help="where to save the page (default: report-GPU.pdf beside the results)")
    return parser


if __name__ == "__main__":
    main()
