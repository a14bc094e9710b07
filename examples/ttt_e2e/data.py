"""Files as bytes: which to read, which to hold out, and what the batch of a step is."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

# Tests and codecs are tables more than text; what is installed beside the standard library differs
# from machine to machine.
_SKIPPED_IN_STANDARD_LIBRARY = {"test", "tests", "encodings", "site-packages", "dist-packages"}

_HELD_OUT_SHARE = 0.1


class Corpus(NamedTuple):
    """Documents as arrays of bytes, each at least as long as what a sequence reads and predicts."""

    training: list[np.ndarray]
    held_out: list[np.ndarray]


def load(paths: Sequence[Path], length: int) -> Corpus:
    """Reads the files at `paths`, folders searched, that hold at least `length` bytes.

    Files are held out whole. A hash of their contents chooses them, so that neither the seed nor the
    place where they lie matters, and copies of a file stay on one side.

    Raises:
      OSError: a path that cannot be read.
      ValueError: fewer than two files that are long enough.
    """
    files = [file for path in paths for file in _files_at(path)]
    documents = {}
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error  # Not every error of reading names it.
        if len(content) >= length:
            documents[hashlib.sha256(content).digest()] = np.frombuffer(content, np.uint8)
    if len(documents) < 2:
        raise ValueError(f"{', '.join(map(str, paths))}: expected two different files or more of at least {length} "
                         f"bytes, one of them to hold out; {len(documents)} of {len(files)} are that long")
    ordered = [documents[digest] for digest in sorted(documents)]
    held_out = max(1, round(_HELD_OUT_SHARE * len(ordered)))
    return Corpus(ordered[held_out:], ordered[:held_out])


def _files_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    if path == STANDARD_LIBRARY:
        names = [name for name in names
                 if name.suffix == ".py" and _SKIPPED_IN_STANDARD_LIBRARY.isdisjoint(name.parts)]
    else:
        names = [name for name in names if not any(part.startswith((".", "__pycache__")) for part in name.parts)]
    return [path / name for name in names]


def batch(documents: Sequence[np.ndarray], length: int, size: int, seed: int, step: int) -> np.ndarray:
    """Passages uint8 `[size, length]` from random places; they depend on seed and step alone.

    Every place of every document is as likely as any other.
    """
    random = np.random.default_rng([seed, step])
    places = np.array([len(document) - length + 1 for document in documents])
    ends = np.cumsum(places)
    drawn = random.integers(ends[-1], size=size)
    which = np.searchsorted(ends, drawn, side="right")
    starts = drawn - (ends - places)[which]
    return np.stack([documents[i][start:start + length] for i, start in zip(which, starts, strict=True)])


def passages(documents: Sequence[np.ndarray], length: int, limit: int) -> np.ndarray:
    """At most `limit` passages uint8 `[passage, length]` that do not overlap, spread over the documents."""
    cut = [document[:len(document) // length * length].reshape(-1, length) for document in documents]
    every = np.concatenate(cut)
    return every[np.linspace(0, len(every) - 1, min(limit, len(every))).astype(int)]
