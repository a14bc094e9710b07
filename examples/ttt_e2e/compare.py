"""Compare finished runs: their loss on held-out files by position in the sequence, as a table and a picture.

    python -m examples.ttt_e2e.compare runs/ttt_e2e/small-*
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from examples.ttt_e2e import report


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the picture."""
    parser = report.teaching_parser("compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FOLDER", help="the --out of a finished run")
    parser.add_argument("--out", type=Path, default=Path("runs/ttt_e2e/loss_by_position.png"), metavar="FILE.png")
    args = parser.parse_args(argv)
    try:
        losses = {folder.name: report.read_losses(folder) for folder in args.runs}
        if len({len(x) for x in losses.values()}) != 1:
            raise ValueError("the runs have sequences of different lengths: expected one length")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    report.draw_by_position(figure.subplots(), losses)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report.save(figure, args.out)
    print(report.table(losses))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
