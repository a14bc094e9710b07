"""What a run leaves behind: a folder in which every file is whole at every moment."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from examples.ttt_e2e.model import Config

try:
    import orbax.checkpoint as orbax
except ImportError:
    orbax = None

MISSING_ORBAX = ("orbax-checkpoint is not installed, and checkpoints need it: pip install orbax-checkpoint, or pass "
                 "--no-checkpoint to train without")


class Record(NamedTuple):
    """One training step: loss in bits per byte and norm of its gradient before it, norm of the weights after it."""

    step: int
    loss: float
    gradient_norm: float
    weight_norm: float


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is at every moment either the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def write_csv(path: Path, header: tuple[str, ...], rows: list[tuple]) -> None:
    """Writes rows of numbers as CSV, atomically."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def write_records(folder: Path, records: list[Record]) -> None:
    """Writes metrics.csv, with all digits: what a resumed run reads is what the first one wrote."""
    write_csv(folder / "metrics.csv", Record._fields, records)


def read_records(folder: Path, steps: int) -> list[Record]:
    """The records of the first `steps` steps."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [Record(int(row.pop("step")), **{name: float(x) for name, x in row.items()})
                for row in csv.DictReader(file)]
    return [row for row in rows if row.step <= steps]


def write_config(folder: Path, config: Config, training: dict[str, Any], files: list[str]) -> None:
    """Writes config.json: the model's configuration, how it is trained, and from what.

    Raises:
      ValueError: the folder holds a run of another configuration.
    """
    path = folder / "config.json"
    content = {"model": dataclasses.asdict(config), "training": training, "data": {"paths": files}}
    if path.exists() and (old := json.loads(path.read_text())) != content:
        changed = [f"{key} was {old.get(part, {}).get(key)!r} and is {value!r}"
                   for part in content for key, value in content[part].items() if old.get(part, {}).get(key) != value]
        raise ValueError(f"{folder} holds a run of another configuration ({'; '.join(changed)}): expected the same, "
                         "to resume it, or another --out")
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The model's configuration of the run in a folder, and how it is trained."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} has no config.json: expected the folder of a run of examples.ttt_e2e.train")
    content = json.loads(path.read_text())
    return Config(**content["model"]), content["training"]


def exist(folder: Path) -> bool:
    """Whether a run in this folder writes checkpoints."""
    return (folder / "checkpoints").is_dir()


class Checkpoints:
    """The last two states of a run, each written beside the others and renamed when it is whole."""

    def __init__(self, folder: Path):
        if orbax is None:
            raise ImportError(MISSING_ORBAX)
        options = orbax.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = orbax.CheckpointManager((folder / "checkpoints").resolve(), options=options)

    def latest(self) -> int | None:
        """The number of steps that the newest whole state has seen, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Starts to write a state; training goes on meanwhile."""
        self._manager.save(step, args=orbax.args.StandardSave(state))

    def restore(self, like: Any) -> Any:
        """The newest state, with the shapes, dtypes and devices of `like`."""
        return self._manager.restore(self._manager.latest_step(), args=orbax.args.StandardRestore(like))

    def close(self) -> None:
        """Waits until what was started is written."""
        self._manager.wait_until_finished()
        self._manager.close()

