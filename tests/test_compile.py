"""Every kernel, with every row of the table of blocks, compiles for its GPU without having one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import resources
from jttt.kernels import blocks, launch
from jttt.kernels.config import Blocks

ROOT = Path(__file__).parents[1]

KERNELS = {entry[0].__name__ for entries in launch.KERNELS.values() for entry in entries}
ROWS = [(capability, *row) for capability, table in blocks.TABLE.items() for row in table]


@pytest.fixture(scope="module")
def compiled():
    """What each row takes, in a process of its own: this one may have Triton's interpreter on."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "benchmarks.resources", "--json"], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    itemsizes = {"bfloat16": 2, "float32": 4}
    return {(row["capability"], row["kernel"], row["width"], itemsizes[row["dtype"]]): row
            for row in json.loads(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_fits_its_gpu(row, compiled):
    taken = compiled[row]
    assert taken["shared"] <= resources.SHARED_MEMORY[row[0]]
    # The table says what it lets a row spill, in bytes of a thread.
    assert taken["spilled"] <= taken["blocks"]["spilled"]


@pytest.mark.parametrize("capability", blocks.TABLE)
def test_table_has_blocks_for_everything(capability):
    for kernel in KERNELS:
        for width in (1, 64, 65, 200, 256):
            for itemsize in (2, 4):
                assert blocks.choose(kernel, width, itemsize, capability)


def test_the_nearest_row_is_chosen(monkeypatch):
    def table(warps):
        return {("kernel", width, 2): Blocks(width, width, warps, 1) for width in (64, 128)}

    monkeypatch.setattr(blocks, "TABLE", {80: table(4), 90: table(8)})
    for capability, warps in ((75, 4), (80, 4), (89, 4), (90, 8), (100, 8), (120, 4)):
        assert blocks.choose("kernel", 64, 2, capability) == Blocks(64, 64, warps, 1)
        assert blocks.choose("kernel", 65, 2, capability) == Blocks(128, 128, warps, 1)
