"""The examples, run as a user runs them."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "optax_inner_loop.py"
TINY = (
    "--batch=2", "--inner-steps=2", "--chunk=16", "--layers=1", "--width=16", "--heads=1", "--held-out=4",
)
FOREVER = "--steps=10000000"
PATIENCE = 300  # Seconds, for a machine that is busy with other work.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four short files."""
    folder = tmp_path_factory.mktemp("examples") / "data"
    folder.mkdir()
    for name in ("one", "two", "three", "four"):
        (folder / f"{name}.txt").write_text(f"the file {name} says {name}\n" * 20)
    return folder


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module, its command not run."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start(data: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the example at its smallest."""
    # Nearly all of the time is compilation: do it roughly, and once for the runs that agree.
    cheap = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(data.with_name("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *TINY, f"--data={data}", f"--out={out}", *flags],
        env=os.environ | cheap | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the example to end: its exit status and its output."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output + errors


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, which must be whole: steps counted from one, and no field missing."""
    text = path.read_text()
    assert text.endswith("\n")
    rows = [{name: float(field) for name, field in row.items()} for row in csv.DictReader(text.splitlines())]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(list(row) == ["step", "loss_before", "loss_after", "seconds"] for row in rows)
    return rows


def wait_for_metrics(process: subprocess.Popen[str], path: Path) -> None:
    """Return once the running example has saved its metrics for the first time."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def running(data: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The example in the midst of training, and its metrics.csv."""
    process, path = start(data, tmp_path, FOREVER), tmp_path / "metrics.csv"
    try:
        wait_for_metrics(process, path)
        yield process, path
    finally:
        process.kill()
        process.communicate()


def complete(data: Path, out: Path, *flags: str) -> tuple[str, Path]:
    """Run three steps of the example to the end: its output, and the folder it wrote."""
    status, output = finish(start(data, out, "--steps=3", *flags))
    assert status == 0, output
    return output, out


@pytest.fixture(scope="module")
def completed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run that went to its end."""
    return complete(data, tmp_path_factory.mktemp("completed"))


def read_losses(out: Path) -> list[tuple[float, float]]:
    """What a run's metrics.csv says of each step, but for the time."""
    return [(row["loss_before"], row["loss_after"]) for row in read_metrics(out / "metrics.csv")]


def test_run_reports_a_table_and_writes_its_files(completed: tuple[str, Path]) -> None:
    output, out = completed
    table = dict(re.findall(r"^  (without adaptation|with adaptation|difference) +([+-]?[0-9.]+)$", output, re.M))
    without, with_, difference = (float(table[row]) for row in ("without adaptation", "with adaptation", "difference"))
    assert difference == pytest.approx(with_ - without, abs=2e-3)
    assert len(read_losses(out)) == 3
    assert (out / "curves.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "metrics.csv"]


def test_same_seed_same_numbers(completed: tuple[str, Path], data: Path, tmp_path: Path) -> None:
    _, first = completed
    _, second = complete(data, tmp_path)
    assert read_losses(first) == read_losses(second)


def test_jttt_learns_what_ordinary_attention_learns(completed: tuple[str, Path], data: Path, tmp_path: Path) -> None:
    _, ours = completed
    _, plain = complete(data, tmp_path, "--attention=jax")
    np.testing.assert_allclose(read_losses(ours), read_losses(plain), atol=1e-4)


def test_interrupted_run_keeps_its_metrics(running: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = running
    process.send_signal(signal.SIGINT)
    status, output = finish(process)
    assert status == 130, output
    assert f"interrupted after {len(read_metrics(path))} of" in output
    assert path.with_name("curves.png").exists()


def test_metrics_are_whole_at_every_moment(running: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = running
    enough = time.monotonic() + 2
    while time.monotonic() < enough:
        assert read_metrics(path)
    process.kill()
    process.wait()
    assert len(read_metrics(path)) >= 10


def test_a_failed_write_leaves_the_old_file(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.csv"
    example.write_atomically(path, b"old")

    def fail(self: Path, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        example.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("content", [None, {}, {"empty.txt": 0}, {"a.txt": 48, "b.txt": 48}, {"only.txt": 500}])
def test_unusable_data_is_refused_before_anything_is_compiled(
    content: dict[str, int] | None, example: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data"
    if content is not None:
        data.mkdir()
        for name, size in content.items():
            (data / name).write_bytes(b"x" * size)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY, f"--data={data}", f"--out={tmp_path / 'out'}"])
    monkeypatch.delattr(example, "learn")
    with pytest.raises(SystemExit) as exit:
        example.main()
    assert exit.value.code == 2
    assert str(data) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_passages_are_cut_without_losing_a_byte(example: ModuleType) -> None:
    document = bytes(range(100))
    passages = example.cut_passages(document, chunks=3, chunk_size=8)
    assert passages.shape == (4, 3, 9)
    assert bytes(passages[..., 1:].ravel()) == document[1:97]
    assert bytes(passages[..., 0].ravel()) == document[0:96:8]
    assert len(example.cut_passages(document[:24], chunks=3, chunk_size=8)) == 0
    assert len(example.cut_passages(document[:25], chunks=3, chunk_size=8)) == 1
