"""The benchmarks' commands run at tiny sizes, and what they count and save is right.

Nothing here looks at a time: a machine that runs tests is no place to measure one.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import accuracy, gradgrad, harness, workload
from benchmarks.workload import Case

ROOT = Path(__file__).parents[1]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m benchmarks.gradgrad` as a user would, on the CPU."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gradgrad", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def case(**changes: object) -> Case:
    return Case(**{"b": 2, "t": 8, "n": 3, "h": 4, "dtype": "float32", "causal": False} | changes)


# The command.


def test_gradgrad_prints_and_saves_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    flags = ("--t", "16", "--n", "2", "--h", "8", "--iters", "2", "--repeats", "2")
    done = run(*flags, "--out", str(out))

    assert done.returncode == 0, done.stderr
    assert "triton: skipped" in done.stdout
    assert "temporary" in done.stdout and "this / xla" in done.stdout
    assert f"saved {out}" in done.stdout

    report = json.loads(out.read_text())
    assert report["platform"] == "cpu"
    assert report["versions"]["jax"] == jax.__version__
    assert report["command"].startswith("python -m benchmarks.gradgrad --t 16 --n 2")

    assert [row["pass"] for row in report["results"]] == list(workload.PASSES)
    for row in report["results"]:
        assert row["implementation"] == "xla"
        assert row["shape"] == {"b": 1, "t": 16, "n": 2, "h": 8}
        assert (row["dtype"], row["causal"], row["failure"]) == ("bfloat16", True, None)
        assert min(row["milliseconds"], row["first_call_seconds"], row["tflops"]) > 0
        assert min(row["spread"], row["temporary_bytes"]) >= 0

    assert len(report["errors"]) == 1 + 3 + 3
    for row in report["errors"]:
        assert 0 < row["error"] < 1e-2, row
        assert row["ratio_to_xla"] == 1


def test_nothing_is_saved_by_default_on_a_cpu() -> None:
    flags = gradgrad.build_parser().parse_args([])
    assert flags.out is None
    assert harness.default_out("gradgrad", jax.devices("cpu")[0]) is None


def test_implementations_are_measured_side_by_side_and_errors_once_per_short_length() -> None:
    flags = gradgrad.build_parser().parse_args(["--t", "512,4096,8192", "--b", "2"])
    described = [task.description for task in gradgrad.list_tasks(flags, ["triton", "xla"])]
    assert described[:3] == ["T=512 forward triton", "T=512 forward xla", "T=512 gradient triton"]
    assert described[17:] == ["T=8192 meta-gradient xla", "T=512 errors", "T=1024 errors"]


def test_help_teaches() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("meta-gradient", "quartiles", "float64", "--t 65536", "default bfloat16"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--t", "16,0"], "argument --t: 0 is not at least 1"),
        (["--t", "long"], "argument --t: invalid list of positive_int value: 'long'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--implementations", "cudnn"], "unknown implementation 'cudnn', known are triton, xla"),
        (["--implementations", "triton", "--device", "cpu"], "none of those asked for runs on"),
    ],
)
def test_bad_flags_say_what_is_wrong(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        gradgrad.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# What is measured.


def test_operations_by_hand() -> None:
    # One product of the scores: batch 2, 3 heads, 8·8 pairs, 4 multiplications and 4 additions.
    product = 2 * 3 * 64 * 8
    assert workload.operations("forward", case()) == 2 * product
    assert workload.operations("gradient", case()) == 7 * product
    assert workload.operations("meta-gradient", case()) == 22 * product
    assert workload.operations("forward", case(causal=True)) == product


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_pass_is_a_pass_over_zeros(dtype: str) -> None:
    attention = functools.partial(accuracy.plain_attention, causal=False)
    inputs = workload.draw(case(dtype=dtype, t=64), jax.random.key(0))
    for name, make in workload.PASSES.items():
        for output in jax.tree.leaves(jax.jit(make(attention))(*inputs)):
            assert np.count_nonzero(output) > 0.9 * output.size, name


def test_inputs_rotate_over_different_sets() -> None:
    sets = workload.rotating_inputs(case(), seed=0)
    assert len(sets) == 64
    assert len({float(array.sum()) for arrays in sets for array in arrays}) == 3 * 64
    again = workload.rotating_inputs(case(), seed=0)
    np.testing.assert_array_equal(sets[5][1], again[5][1])


# How it is timed.


def test_launches_are_warmed_up_counted_and_rotated() -> None:
    seen = []
    times = harness.time_launches(seen.append, [(0,), (1,), (2,)], iters=4, warmup=2, repeats=3)
    assert len(times) == 3
    assert seen == [index % 3 for index in range(2 + 3 * 4)]


def test_median_and_spread_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time_launches", lambda *_, **__: [1.0, 2.0, 3.0, 4.0, 100.0])
    inputs = [(np.ones(2, np.float32),)]
    measured = harness.measure(lambda x: 2 * x, inputs, iters=1, warmup=1, repeats=5)
    assert (measured.milliseconds, measured.spread, measured.failure) == (3.0, 2.0, None)


def test_running_out_of_memory_is_a_result_and_other_failures_are_not() -> None:
    def fail(message: str) -> harness.Measurement:
        def function(_: jax.Array) -> None:
            raise jax.errors.JaxRuntimeError(message)

        return harness.measure(function, [(np.ones(1),)], iters=1, warmup=1, repeats=1)

    assert fail("RESOURCE_EXHAUSTED: allocating 1 TiB").failure == "out of memory"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fail("INTERNAL: illegal address")


def test_a_cell_out_of_memory_has_its_row_in_the_table() -> None:
    names = {"implementation": "xla", "pass": "forward", "shape": {"t": 8}}
    failed = harness.Measurement(temporary_bytes=2**30, failure="out of memory")
    table = gradgrad.results_table([names | vars(failed) | {"tflops": None}])
    assert "out of memory" in table and "1,024.0 MiB" in table


# How it is compared, and saved.


def test_relative_error() -> None:
    exact = np.array([3.0, 4.0])
    assert accuracy.relative_error(np.array([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert accuracy.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert np.isnan(accuracy.relative_error(np.array([np.nan, 4.0]), exact))


def test_errors_are_taken_against_something_more_exact() -> None:
    rows = list(accuracy.errors(case(t=32), ["xla"], seed=0))
    assert [row["pass"] for row in rows] == ["forward"] + 3 * ["gradient"] + 3 * ["meta-gradient"]
    assert all(1e-9 < row["error"] < 1e-5 for row in rows), rows


def test_saving_replaces_the_whole_file_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    harness.save_json(path, {"results": [1]})
    with pytest.raises(TypeError):
        harness.save_json(path, {"results": object()})
    assert json.loads(path.read_text()) == {"results": [1]}
    harness.save_json(path, {"results": [2]})
    assert json.loads(path.read_text()) == {"results": [2]}
    assert list(tmp_path.iterdir()) == [path]
