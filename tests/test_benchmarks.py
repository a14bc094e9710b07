"""The benchmarks' commands run at tiny sizes, and what they count and save is right.

Nothing here looks at a time: a machine that runs tests is no place to measure one.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import accuracy, compare, forward, gradgrad, harness, masks, plots, report, sweep, tune, workload
from benchmarks.harness import Record
from benchmarks.workload import Case
from jttt.modes import BWD_MODES

ROOT = Path(__file__).parents[1]


TINY = ("--h", "2", "--d", "8", "--iters", "1", "--repeats", "2", "--warmup", "1")


def run(*flags: str, command: str = "gradgrad") -> subprocess.CompletedProcess[str]:
    """Runs `python -m benchmarks.COMMAND` as a user would, on the CPU."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{command}", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def case(**changes: object) -> Case:
    return Case(**{"b": 2, "t": 8, "n": 3, "k": 3, "h": 4, "dtype": "float32", "causal": False} | changes)


# The command.


def test_gradgrad_prints_and_saves_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    flags = ("--t", "16", "--h", "2", "--k", "1", "--d", "8", "--iters", "2", "--repeats", "2")
    done = run(*flags, "--out", str(out))

    assert done.returncode == 0, done.stderr
    assert "triton: skipped" in done.stdout
    assert "temporary" in done.stdout and "this / xla" in done.stdout
    assert f"saved {out}" in done.stdout

    report = json.loads(out.read_text())
    assert report["platform"] == "cpu"
    assert report["versions"]["jax"] == jax.__version__
    assert report["command"].startswith("python -m benchmarks.gradgrad --t 16 --h 2")

    assert [row["pass"] for row in report["results"]] == list(workload.PASSES)
    for row in report["results"]:
        assert row["implementation"] == "xla"
        assert row["shape"] == {"b": 1, "t": 16, "n": 2, "k": 1, "h": 8}
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


COMMANDS = {
    gradgrad: ("meta-gradient", "quartiles", "float64", "--t 65536", "default bf16", "--bwd_mode"),
    forward: ("math", "--no-compile", "--iters 50", "cudnn"),
    sweep: ("crossover", "--ts", "out of memory", "save_p_triton_full", "FILE-speedup.png"),
    compare: ("tokamax", "PyTorch", "named and skipped"),
    report: ("One page", "--gpu"),
    masks: ("window", "key_start"),
    tune: ("block sizes", "--spill"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
def test_help_teaches(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for word in COMMANDS[command]:
        assert word in printed


@pytest.mark.parametrize("command", [gradgrad, forward, sweep, compare], ids=lambda module: module.__name__)
def test_every_command_has_the_same_flags(command: ModuleType) -> None:
    flags = command.build_parser().parse_args(
        "--b 2 --h 4 --k 2 --t 2048 --d 128 --dtype fp16 --iters 50 --warmup 2 --repeats 4 --seed 1 --device cpu "
        "--out x".split())
    assert workload.cases(flags, causal=True) == [
        Case(b=2, t=2048, n=4, k=2, h=128, dtype="float16", causal=True)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--t", "16,0"], "argument --t: 0 is not at least 1"),
        (["--t", "long"], "argument --t: invalid list of positive_int value: 'long'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--h", "4", "--k", "3"], "argument --k: 3 key heads for 4 heads"),
        (["--implementations", "cudnn"], "unknown name 'cudnn', known are triton, xla, or all"),
        (["--bwd_mode", "fast"], f"unknown name 'fast', known are {', '.join(BWD_MODES)}, or all"),
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


def test_forward_prints_a_line_for_each_implementation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for how in ("--compile", "--no-compile"):
        forward.main(["--t", "16", *TINY, "--dtype", "fp16", "--device", "cpu", how, "--out", str(tmp_path / how)])
        printed = capsys.readouterr().out
        assert re.search(r"^math forward: \d+\.\d{3} ms", printed, re.MULTILINE)
        assert "xla: jax.nn.dot_product_attention has no float16 on a CPU" in printed
        assert "triton: skipped" in printed and "cudnn: skipped" in printed
        [row] = json.loads((tmp_path / how).read_text())["results"]
        assert (row["label"], row["implementation"], row["compiled"]) == ("math", "plain", how == "--compile")


def test_compare_names_what_it_skips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "compare.json"
    compare.main(["--t", "16", *TINY, "--k", "1", "--device", "cpu", "--out", str(out)])
    printed = capsys.readouterr().out
    saved = json.loads(out.read_text())
    for name in ("jttt", "cudnn", "torch-flash"):
        assert f"{name}: skipped, it needs an NVIDIA GPU" in printed and name in saved["skipped"]
    xla = [row for row in saved["results"] if row["implementation"] == "xla"]
    assert [row["pass"] for row in xla] == list(workload.PASSES) and all(row["milliseconds"] > 0 for row in xla)


def test_pytorch_computes_the_same_passes() -> None:
    pytest.importorskip("torch")
    flags = compare.build_parser().parse_args(["--device", "cpu", "--iters", "1", "--repeats", "1"])
    torch_math = next(peer for peer in compare.peers() if peer.name == "torch-math")
    for name in workload.PASSES:
        assert torch_math.measure(case(k=1), name, flags).milliseconds > 0


def test_a_benchmark_on_modal_is_the_command_itself() -> None:
    pytest.importorskip("modal")
    from benchmarks import modal_app

    files = modal_app.benchmark.local("sweep", ["--ts", "8", *TINY, "--device", "cpu"])
    assert sorted(files) == ["sweep-modal-speedup.png", "sweep-modal-time.png", "sweep-modal.csv"]
    assert len(sweep.from_csv(files["sweep-modal.csv"].decode())[1]) == 2
    with pytest.raises(ValueError, match="command was 'train': expected one of forward, gradgrad, sweep"):
        modal_app.benchmark.local("train", [])


# A sweep.


def test_sweep_writes_its_rows_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.csv"
    sweep.main(["--ts", "8,16", *TINY, "--device", "cpu", "--bwd_mode", "all", "--out", str(out)])
    assert "save_p_triton_full: skipped" in capsys.readouterr().out
    run, rows = sweep.from_csv(out.read_text())
    assert run["device"] and run["command"].startswith("python -m benchmarks.sweep --ts 8,16")
    assert [(row["causal"], row["t"], row["mode"]) for row in rows] == [
        (causal, t, "math") for causal in (False, True) for t in (8, 16)]
    assert all(row["mean_ms"] > 0 and row["deviation_ms"] >= 0 and row["failure"] is None for row in rows)
    for name in ("time", "speedup"):
        assert sweep.picture(out, name).read_bytes().endswith(b"IEND\xaeB`\x82")


def test_a_sweep_is_drawn_again_from_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "killed.csv"
    path.write_text(sweep.to_csv(RUN, sweep_rows()[:8]))  # Lengths of which some modes are missing.
    sweep.main(["--draw", str(path)])
    printed = capsys.readouterr().out
    assert "crossover, full flash" in printed and "save_p_triton_full" in printed
    for name in ("time", "speedup"):
        assert f"killed-{name}.png" in printed
        assert sweep.picture(path, name).read_bytes().endswith(b"IEND\xaeB`\x82")
    for text, message in (("", "has no rows"), ("a,b\n1,2\n", "expected a CSV that this command wrote")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            sweep.main(["--draw", str(path)])
        error = capsys.readouterr().err
        assert "argument --draw: " in error and message in error
    with pytest.raises(SystemExit):
        sweep.main(["--draw", str(tmp_path / "missing.csv")])
    assert "No such file" in capsys.readouterr().err


def test_an_interrupted_sweep_keeps_its_rows_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[1.0, 2.0]])

    def launches(*_: object, **__: object) -> list[float]:
        for found in times:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "time_launches", launches)
    out = tmp_path / "x.csv"
    with pytest.raises(KeyboardInterrupt):
        sweep.main(["--ts", "8,16", *TINY, "--device", "cpu", "--out", str(out)])
    [row] = sweep.from_csv(out.read_text())[1]
    assert (row["t"], row["mean_ms"]) == (8, 1.5)
    assert sweep.picture(out, "time").exists() and sweep.picture(out, "speedup").exists()


def test_a_case_that_fails_has_its_reason_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cells(flags: object, device: object) -> list[sweep.Cell]:
        good = case(t=8, dtype="float32")
        return [sweep.Cell(good, "save_p", "save_p"), sweep.Cell(good, "xla", "math"),
                sweep.Cell(case(t=16, dtype="float32"), "xla", "math")]

    def launches(compiled: object, input_sets: list, **_: int) -> list[float]:
        if input_sets[0][0].shape[1] == 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 TiB")
        return [1.0]

    def save_p(*_: object, **__: object) -> None:
        raise ValueError("a mode that\nfails")

    monkeypatch.setattr(sweep, "list_cells", cells)
    monkeypatch.setattr(harness, "time_launches", launches)
    monkeypatch.setitem(workload.IMPLEMENTATIONS, "save_p", save_p)
    sweep.main([*TINY, "--device", "cpu", "--out", str(tmp_path / "x.csv")])
    _, rows = sweep.from_csv((tmp_path / "x.csv").read_text())
    assert [row["failure"] for row in rows] == ["ValueError: a mode that", None, "out of memory"]
    assert [row["median_ms"] for row in rows] == [None, 1.0, None]
    assert "out of memory" in capsys.readouterr().out


def sweep_rows() -> list[Record]:
    """A sweep of every mode, made up: flash is faster from 512 on, math fails at 1024 where there is no mask."""
    rows = []
    for causal in (False, True):
        for t in (256, 512, 1024):
            for mode in plots.STYLES:
                time = 1e-3 * t if mode != "flash" else 0.4
                failed = mode == "math" and t == 1024 and not causal
                rows.append({
                    "causal": causal, "t": t, "mode": mode, "mean_ms": None if failed else time,
                    "deviation_ms": None if failed else 0.1 * time, "median_ms": None if failed else time,
                    "temporary_bytes": t, "failure": "out of memory" if failed else None})
    return rows


RUN = {"device": "a device", "versions": {"jax": "1"}, "date": "2026-01-01T00:00:00", "problem": "B=1",
       "command": "python -m benchmarks.sweep " + "--flag value " * 20}


def test_crossover_is_the_length_from_which_on_a_mode_is_faster() -> None:
    rows = sweep_rows()
    found = sweep.crossovers(rows)
    assert found[False, "flash"] == found[True, "flash"] == 512
    assert found[True, "save_p"] is None  # As fast is not faster,
    assert found[False, "save_p"] == 1024  # and math fails here.
    rows[-1] |= {"median_ms": 0.01}
    next(row for row in rows if row["causal"] and row["t"] == 1024 and row["mode"] == "flash")["median_ms"] = 2.0
    assert sweep.crossovers(rows)[True, "flash"] is None


def test_a_csv_is_read_as_it_was_written() -> None:
    run, rows = sweep.from_csv(sweep.to_csv(RUN, sweep_rows()))
    assert rows == sweep_rows()
    assert run["command"] == RUN["command"]
    assert run["versions"] == "jax 1"


def test_pictures_have_units_and_lines_that_differ_without_colour() -> None:
    styles = [(str(line), marker) for _, line, marker in plots.STYLES.values()]
    assert len(set(styles)) == len(styles) and set(plots.STYLES) == {"math", *BWD_MODES}
    for figure, unit in ((plots.times(RUN, sweep_rows()), "(ms)"), (plots.speedups(RUN, sweep_rows()), "(×)")):
        assert unit in figure.axes[0].get_ylabel()
        assert all("(tokens)" in axes.get_xlabel() for axes in figure.axes)
        assert "math at 1024: out of memory" in figure.axes[0].get_xlabel()
        assert_no_text_overlaps(figure)


def assert_no_text_overlaps(figure: Figure) -> None:
    """No two texts of a figure lie on each other, and none lies beyond its edge."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    out_of_view = {tick.label1 for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
                   for tick in axis.get_major_ticks()
                   if not axis.get_view_interval()[0] <= tick.get_loc() <= axis.get_view_interval()[1]}
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.findobj(Text)
             if text.get_text().strip() and text.get_visible() and text not in out_of_view]
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.shrunk(0.98, 0.9).overlaps(other_box.shrunk(0.98, 0.9)), (text, other)


# A report.


@pytest.mark.parametrize("sweeps", [0, 1, 2])
def test_report_is_one_page_on_which_nothing_overlaps(sweeps: int, tmp_path: Path) -> None:
    for path in harness.RESULTS.glob("gradgrad*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    gpu = report.newest_gpu(tmp_path)
    for i in range(sweeps):
        (tmp_path / f"sweep-{i}-{gpu}.csv").write_text(sweep.to_csv(RUN, sweep_rows()))
    report.main(["--results", str(tmp_path)])
    pdf = (tmp_path / f"report-{gpu}.pdf").read_bytes()
    assert len(re.findall(rb"/Type /Page\b", pdf)) == 1
    results = report.read(tmp_path, gpu)
    assert len(results.sweeps) == sweeps
    page = report.page(results)
    assert_no_text_overlaps(page)
    text = "\n".join(text.get_text() for text in page.texts)
    for word in (report.chain_of_rules(), "NVIDIA", "speed-up", "python -m benchmarks.gradgrad"):
        assert word in text
    report.save(page, tmp_path / "again.pdf")
    assert (tmp_path / "again.pdf").read_bytes() == pdf


def test_a_report_of_nothing_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path)])
    assert "run python -m benchmarks.gradgrad" in capsys.readouterr().err


# What is measured.


def test_grouped_heads_share_keys() -> None:
    query, key, value = workload.draw(case(n=4, k=2), jax.random.key(0))
    assert query.shape == (2, 8, 4, 4) and key.shape == value.shape == (2, 8, 2, 4)
    rows = list(accuracy.errors(case(n=4, k=2, t=32), ["xla"], seed=0))
    assert all(1e-9 < row["error"] < 1e-5 for row in rows), rows


def test_every_mode_is_an_implementation() -> None:
    names = [workload.implementation_of(mode) for mode in BWD_MODES]
    assert names[0] == "triton" and set(names) <= set(workload.IMPLEMENTATIONS)


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
    problem = case(b=2, t=2048, n=16, k=16, h=64)
    sets = workload.rotating_inputs(problem, seed=0)
    assert 2**28 <= sum(array.nbytes for arrays in sets for array in arrays) < 2**28 + 3 * sets[0][0].nbytes
    assert len({float(array.sum()) for arrays in sets for array in arrays}) == 3 * len(sets)
    again = workload.rotating_inputs(problem, seed=0)
    np.testing.assert_array_equal(sets[5][1], again[5][1])


@pytest.mark.parametrize(("set_bytes", "sets"), [
    (2**30, 2), (2**27, 2), (2**26, 4), (2**22, 64), (2**20, 64), (50 * 2**14, 2)])
def test_sets_are_more_than_a_cache_holds_or_two(set_bytes: int, sets: int) -> None:
    assert workload.sets_beyond_cache(set_bytes) == sets


# How it is timed.


def test_launches_are_warmed_up_counted_and_rotated() -> None:
    seen = []
    times = harness.time_launches(seen.append, [(0,), (1,), (2,)], iters=4, warmup=2, repeats=3)
    assert len(times) == 3
    assert seen == [index % 3 for index in range(2 + 3 * 4)]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_outputs_are_dropped_where_launches_run_in_order(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Output:
        pass

    alive, most, waited = weakref.WeakSet(), [], []

    def launch(_: int) -> Output:
        output = Output()
        alive.add(output)
        most.append(len(alive))
        return output

    monkeypatch.setattr(harness, "_on_cpu", lambda outputs: on_cpu)
    harness.time_launches(launch, [(0,)], iters=9, warmup=1, repeats=1,
                          wait=lambda outputs: waited.append(len(outputs)))
    assert (max(most), waited) == ((9, [1, 9]) if on_cpu else (3, [1, 2]))


def test_median_and_spread_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time_launches", lambda *_, **__: [1.0, 2.0, 3.0, 4.0, 100.0])
    inputs = [(np.ones(2, np.float32),)]
    measured = harness.measure(lambda x: 2 * x, inputs, iters=1, warmup=1, repeats=5)
    assert (measured.milliseconds, measured.spread, measured.failure) == (3.0, 2.0, None)
    assert measured.mean == 22.0 and measured.deviation == pytest.approx(np.sqrt(1522.0))


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
