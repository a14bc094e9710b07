"""Every kernel, with every row of the table of blocks, compiles for its GPU without having one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import resources, tune
from jttt.kernels import blocks, hopper, launch
from jttt.kernels.config import Blocks

ROOT = Path(__file__).parents[1]

KERNELS = {entry[0].__name__ for entries in launch.KERNELS.values() for entry in entries}
ROWS = [(capability, *row) for capability, table in blocks.TABLE.items() for row in table]


def python(*arguments: str) -> str:
    """What Python prints in a process of its own: this one may have Triton's interpreter on."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment | {"PYTHONPATH": "."},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled():
    """What each row takes."""
    itemsizes = {"bfloat16": 2, "float32": 4}
    return {(row["capability"], row["kernel"], row["width"], itemsizes[row["dtype"]]): row
            for row in json.loads(python("-m", "benchmarks.resources", "--json"))}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_fits_its_gpu(row, compiled):
    taken = compiled[row]
    assert taken["shared"] <= resources.SHARED_MEMORY[row[0]]
    # The table says what it lets a row spill, in bytes of a thread.
    assert taken["spilled"] <= taken["blocks"]["spilled"]


@pytest.mark.slow
def test_hopper_takes_everything_that_hides_keys_at_once():
    fits = python("-c", """
import jax.numpy as jnp
from benchmarks import resources
from jttt.kernels import hopper
for kernel, _ in hopper.KERNELS.values():
    planned = resources.launch_of(kernel.__name__, 128, jnp.float16, 90, every=True)
    for array in ("bias", "mask", "key_start", "query_segments", "block_list"):
        assert planned.arguments[array] is not None, array
    _, _, shared = resources.compile_resources(planned)
    print(shared <= resources.SHARED_MEMORY[90])
""")
    assert fits.split() == ["True"] * len(hopper.KERNELS)


def test_a_row_is_compiled_as_the_kernel_that_it_names():
    for kernel in ("forward_kernel", "forward_hopper", "g_key_value_kernel", "g_key_value_hopper"):
        planned = resources.launch_of(kernel, 64, jnp.bfloat16, 90)
        assert planned.kernel.__name__ == kernel
        assert planned.config.blocks == blocks.TABLE[90][kernel, 64, 2]


def test_a_hopper_program_of_eight_warps_has_a_multiprocessor_for_itself():
    small, large = (resources.launch_of("g_query_hopper", 128, jnp.bfloat16, 90, cut=cut)
                    for cut in (Blocks(64, 64, 4, 1), Blocks(128, 64, 8, 2)))
    plain = resources.launch_of("g_query_kernel", 128, jnp.bfloat16, 90, cut=Blocks(128, 64, 8, 2))
    assert (small.at_once, large.at_once, plain.at_once) == (264, 132, 264)


def test_rows_are_written_in_their_places(tmp_path):
    path = tmp_path / "blocks.py"
    path.write_text(Path(blocks.__file__).read_text())
    rows = {(capability, *row): cut for capability, table in blocks.TABLE.items() for row, cut in table.items()}
    resources.write(rows, path)
    assert path.read_text() == Path(blocks.__file__).read_text()
    new = {(90, "d_query_hopper", 64, 2): Blocks(128, 32, 8, 3, spilled=4, most_registers=168),
           (80, "d_query_kernel", 64, 4): Blocks(1, 2, 3, 4)}
    resources.write(new, path)
    written = {}
    exec(path.read_text(), written)
    assert {(capability, *row): cut for capability, table in written["TABLE"].items()
            for row, cut in table.items()} == rows | new


def test_what_runs_on_hopper_is_tuned_there():
    assert tune.kernels_for(64, "float16", 90) == [kernel.__name__ for kernel, _ in hopper.KERNELS.values()]
    for width, dtype, capability in ((256, "float16", 90), (64, "float32", 90), (64, "float16", 80)):
        assert tune.kernels_for(width, dtype, capability) == list(hopper.KERNELS)
    for kernel, resident in (("g_query_hopper", "queries"), ("g_key_value_hopper", "keys")):
        cuts = tune.candidates(tune.Problem(kernel, 128, "bfloat16", 1, 2, 256, True, 90))
        assert len(cuts) == len(set(cuts)) == 22
        assert all(getattr(cut, resident) == 16 * cut.warps for cut in cuts)


def test_only_what_computes_the_same_is_timed(capsys):
    pytest.importorskip("flatbuffers")
    problem = tune.Problem("forward_kernel", 8, "float32", 1, 2, 32, True, 80)

    def exported(factor):
        arrays = tune.inputs(problem)
        function = jax.jit(lambda query, key, value: {"output": factor * query})
        return bytes(jax.export.export(function)(*arrays).serialize())

    right, wrong = exported(2.0), exported(2.1)
    compiled = [(Blocks(64, 64, 4, stages), 100, spilled, 0, program) for stages, (spilled, program) in enumerate(
        [(0, right), (0, wrong), (300, right), (0, None)])]
    rows = tune.tune(problem, right, compiled, spill=200, keep=1)
    assert [row["milliseconds"] is not None for row in rows] == [True, False, False, False]
    assert capsys.readouterr().out.count("its results are not those of the kernel in plain Triton") == 1


def test_the_fastest_is_written(monkeypatch):
    written = {}
    monkeypatch.setattr(resources, "write", lambda rows, path: written.update(rows))
    monkeypatch.setattr(resources, "compile_resources", lambda planned: (255, planned.config.blocks.queries // 8, 0))
    row = dict(kernel="forward_hopper", width=64, dtype="bfloat16", keys=32, warps=4, stages=2, most_registers=168)
    times = ((64, 2.0, 4), (128, 1.0, 4), (16, 0.9, 1), (32, None, 0))
    tune.write([row | dict(queries=x, milliseconds=y, looks=z) for x, y, z in times], 90)
    assert written == {(90, "forward_hopper", 64, 2): Blocks(128, 32, 4, 2, spilled=16, most_registers=168)}


@pytest.mark.parametrize("capability", blocks.TABLE)
def test_table_has_blocks_for_everything(capability):
    for kernel in KERNELS:
        for width in (1, 64, 65, 200, 256):
            for itemsize in (2, 4):
                assert blocks.choose(kernel, width, itemsize, capability)
    for kernel in hopper.KERNELS.values():
        assert blocks.choose(kernel[0].__name__, 128, 2, 90)


def test_the_nearest_row_is_chosen(monkeypatch):
    def table(warps):
        return {("kernel", width, 2): Blocks(width, width, warps, 1) for width in (64, 128)}

    monkeypatch.setattr(blocks, "TABLE", {80: table(4), 90: table(8)})
    for capability, warps in ((75, 4), (80, 4), (89, 4), (90, 8), (100, 8), (120, 4)):
        assert blocks.choose("kernel", 64, 2, capability) == Blocks(64, 64, warps, 1)
        assert blocks.choose("kernel", 65, 2, capability) == Blocks(128, 128, warps, 1)


@pytest.mark.slow
def test_a_limit_of_registers_reaches_the_compiler():
    taken = json.loads(python("-c", """
import json
import jax.numpy as jnp
from benchmarks import resources
from jttt.kernels.config import Blocks
cuts = [Blocks(32, 64, 4, 2, most_registers=most) for most in (None, 168)]
print(json.dumps([resources.compile_resources(resources.launch_of(
    "g_key_value_hopper", 64, jnp.bfloat16, 90, cut=cut)) for cut in cuts]))
""").splitlines()[0])
    assert taken[0][0] > 168 >= taken[1][0]
