"""The table of targets: its rows at tiny sizes, what its programs compute, and when a row is met."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import accuracy, harness, targets, workload
from benchmarks.workload import Case


def case(**changes: object) -> Case:
    return Case(**{"b": 2, "t": 8, "n": 3, "k": 3, "h": 4, "dtype": "float32", "causal": False} | changes)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        targets.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for word in ("cuDNN", "one that fails otherwise leaves its row open", *targets.ROWS):
        assert word in printed


def test_targets_are_measured_beside_their_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "targets.json"
    targets.main(["--rows", "order-two,chunk,first-call", "--device", "cpu", "--out", str(out)], scale=1 / 512)
    printed = capsys.readouterr().out
    rows = json.loads(out.read_text())["results"]
    assert [row["row"] for row in rows] == ["order-two"] * 2 + ["chunk"] * 2 + ["first-call"]
    assert all(row["value"] > 0 and row["met"] is not None for row in rows)
    for row in rows:
        assert f"{row['what']}  " in printed and row["problem"] in printed
    assert rows[2]["problem"] == "B1 N12 H64 T2 S18 bfloat16 window 16"
    assert rows[2]["value"] == rows[2]["peer"]["milliseconds"] / rows[2]["ours"]["milliseconds"]
    assert rows[4]["ours"]["first_call_seconds"] == rows[4]["value"]


def test_targets_at_their_own_size_ask_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        targets.main(["--device", "cpu"])
    assert "argument --device: these rows need an NVIDIA GPU" in capsys.readouterr().err


def test_every_name_has_its_rows_and_no_two_are_alike() -> None:
    rows = targets.list_rows(targets.ROWS)
    assert list(dict.fromkeys(row.name for row in rows)) == list(targets.ROWS)
    assert len({(row.ours, row.peer, row.quantity) for row in rows}) == len(rows)
    assert targets.list_rows(["long"]) == [row for row in rows if row.name == "long"]


def test_programs_compute_what_they_are_named_for() -> None:
    program = targets.Program("order two", "jttt", case(n=2, k=2, h=8))
    arrays = workload.normal(jax.random.key(0), targets.shapes_of(program), "float32")
    plain = functools.partial(accuracy.plain_attention, causal=False)
    _, pull_back = jax.vjp(targets.forward_and_backward(plain), *arrays[:4])
    results = targets.order_two(plain)(*targets.order_two_inputs(*arrays))
    for name, expected in zip(("g_query", "g_key", "g_value", "t_output"), pull_back(arrays[4:]), strict=True):
        np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-5)
    # The chunk's mask says the same as its offset and window.
    chunk = targets.Program("forward", "jttt", case(n=2, k=2, h=8, causal=True), cache=24, window=20)
    arrays = workload.normal(jax.random.key(0), targets.shapes_of(chunk), "float32")
    ours, masked = (targets.attention_of(dataclasses.replace(chunk, who=who))(*arrays) for who in ("jttt", "xla"))
    np.testing.assert_allclose(ours, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "peer", "met"),
    [
        (harness.Measurement(1.0), harness.Measurement(1.0), True),
        (harness.Measurement(1.01), harness.Measurement(1.0), False),
        (harness.Measurement(1.0), harness.Measurement(failure="out of memory"), True),
        (harness.Measurement(1.0), harness.Measurement(failure="RuntimeError: no cuDNN"), None),
        (harness.Measurement(failure="out of memory"), harness.Measurement(failure="out of memory"), False),
    ],
)
def test_a_target_is_met_missed_or_open(ours: harness.Measurement, peer: harness.Measurement, met: bool | None) -> None:
    program = targets.Program("forward", "jttt", case())
    row = targets.Row("forward", program, dataclasses.replace(program, who="cudnn"), "speed-up", 1.0)
    record = targets.record(row, ours, peer)
    assert record["met"] is met and record["peer"]["name"] == "cudnn"
    assert {True: "met", False: "MISSED", None: "open"}[met] in targets.table([record])


def test_quantities_of_a_target_by_hand() -> None:
    program = targets.Program("meta-gradient", "jttt", case(t=16))
    row = targets.Row("long", program, dataclasses.replace(program, case=case(t=8)), "", 0)
    ours = harness.Measurement(2.0, temporary_bytes=3 * 4 * 2 * 16 * 3 * 4, first_call_seconds=5.0)
    peer = harness.Measurement(1.0)
    values = {name: quantity.value(row, ours, peer) for name, quantity in targets.QUANTITIES.items()}
    assert values.pop("TFLOP/s") == pytest.approx(22 * 2 * 2 * 3 * 16**2 * 4 / 2e-3 / 1e12)
    # Four times the operations in twice the time.
    assert values == pytest.approx(
        {"speed-up": 0.5, "rate / peer's": 2.0, "memory / query": 3.0, "first call (s)": 5.0})
