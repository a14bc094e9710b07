"""The benchmarks on a rented H100, for who has no GPU: needs the `modal` package and an account there.

    pip install -e '.[benchmarks]' modal && modal setup
    modal run benchmarks/modal_app.py                                             # benchmarks.gradgrad
    modal run benchmarks/modal_app.py --command sweep --flags "--bwd_mode all --ts 512,1024,2048"
    modal run benchmarks/modal_app.py --command forward --flags "--b 2 --h 4 --t 2048" --out runs/h100
    modal run benchmarks/modal_app.py::check                                      # the tests that need a GPU

Runs `python -m benchmarks.COMMAND FLAGS` there, prints what it prints, and brings its files to --out
(default: benchmarks/results, where a run on one's own GPU would leave them).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import modal

COMMANDS = ("forward", "gradgrad", "sweep", "compare", "masks")
SUFFIXES = {"sweep": ".csv"}
ROOT = Path(__file__).parents[1]
THERE = "/jttt"

app = modal.App("jttt-benchmarks")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install("jax[cuda12]>=0.11", "jax-triton>=0.4.1", "triton>=3.7", "optax", "matplotlib", "tqdm",
                 "flatbuffers", "pytest", "hypothesis")
    .env({"PYTHONPATH": THERE})
    .workdir(THERE)
    .add_local_dir(ROOT, THERE, ignore=[".*", "**/__pycache__", "runs", "benchmarks/results"])
)


@app.function(image=image, gpu="H100", timeout=3600)
def benchmark(command: str, flags: list[str]) -> dict[str, bytes]:
    """Runs one command; returns the files that it wrote, by name."""
    if command not in COMMANDS:
        raise ValueError(f"command was {command!r}: expected one of {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{command}-modal{SUFFIXES.get(command, '.json')}"
        subprocess.run([sys.executable, "-m", f"benchmarks.{command}", *flags, "--out", str(out)], check=True)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@app.function(image=image, gpu="H100", timeout=3600)
def gpu_tests(selection: str = "tests") -> int:
    """Runs the tests marked `gpu`; returns pytest's exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", selection]).returncode


@app.local_entrypoint()
def main(command: str = "gradgrad", flags: str = "", out: str = "benchmarks/results") -> None:
    """Runs a command there and keeps its files here."""
    for name, content in benchmark.remote(command, flags.split()).items():
        path = Path(out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"saved {path}")


@app.local_entrypoint()
def check() -> None:
    """Runs the tests there."""
    sys.exit(gpu_tests.remote())
