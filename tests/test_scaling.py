"""The benchmark of several devices runs on simulated ones, and its ratios are of what it says."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks import scaling

TINY = ("--device", "cpu", "--devices", "2", "--t", "8", "--ring-t", "16", "--h", "2", "--d", "4", "--iters", "1",
        "--repeats", "1", "--warmup", "1", "--dtype", "fp32", "--scale", "128")


@pytest.mark.slow
def test_attention_compares_all_devices_with_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results.json"
    scaling.main(["batch", "heads", "ring", *TINY, "--out", str(out)])
    assert "efficiency" in capsys.readouterr().out

    report = json.loads(out.read_text())
    assert report["devices"] == 2
    rows = {(row["measurement"], row["pass"], row["devices"]): row for row in report["results"]}
    passes = [("batch", "meta-gradient"), ("heads", "meta-gradient"), *(
        ("ring", name) for name in ("forward", "gradient", "meta-gradient"))]
    assert [*rows] == [(*cell, devices) for cell in passes for devices in (1, 2)]
    for name, pass_name in passes:
        alone, shared = rows[name, pass_name, 1], rows[name, pass_name, 2]
        assert shared["shape"]["b"] == (2 if name == "batch" else 1)
        work = 2 if name == "batch" else 1
        assert shared["speed_up"] == pytest.approx(work * alone["milliseconds"] / shared["milliseconds"])
        assert shared["efficiency"] == shared["speed_up"] / 2
        assert shared["memory_ratio"] == shared["temporary_bytes"] / alone["temporary_bytes"]
        if name == "ring":
            assert 0 < shared["difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_compilation")
def test_a_step_sees_the_same_sequences_on_one_device_and_on_all(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results.json"
    scaling.main(["step", *TINY, "--out", str(out)])
    assert "tokens/s" in capsys.readouterr().out

    alone, shared = json.loads(out.read_text())["results"]
    assert [(row["devices"], row["shape"]) for row in (alone, shared)] == [
        (1, {"b": 4, "t": 64}), (2, {"b": 8, "t": 64})]
    assert shared["tokens_per_second"] == pytest.approx(1e3 * 8 * 64 / shared["milliseconds"])
    assert shared["speed_up"] == pytest.approx(shared["tokens_per_second"] / alone["tokens_per_second"])
    assert shared["efficiency"] == shared["speed_up"] / 2
    assert shared["difference"] == abs(shared["loss"] - alone["loss"]) / alone["loss"] < 1e-5


@pytest.mark.parametrize(("flags", "message"), [
    (("rings",), "unknown measurement 'rings', known are batch, heads, ring, step"),
    (("--devices", "100"), "100 asked for"),
    (("--devices", "2", "--h", "3"), "expected multiples of 2 and 4 for 2 devices"),
])
def test_bad_flags_say_what_is_wrong(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--device", "cpu", *flags])
    assert message in capsys.readouterr().err


def test_the_default_measures_everything() -> None:
    flags = scaling.build_parser().parse_args([])
    mesh = jax.make_mesh((1,), (scaling.AXIS,), devices=jax.devices("cpu")[:1])
    assert [task.description for task in scaling.list_tasks(flags, mesh)] == [
        "batch meta-gradient", "heads meta-gradient", "ring forward", "ring gradient", "ring meta-gradient",
        "step training step"]
