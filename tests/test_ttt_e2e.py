"""The TTT-E2E example: its model beside Python loops and plain attention, its commands as a user runs them."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from benchmarks import harness
from benchmarks import ttt_e2e as benchmark
from examples.ttt_e2e import checkpoints, compare, data, generate, model, reading, train
from tests import plain

pytestmark = pytest.mark.usefixtures("cheap_compilation")

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # Seconds, for a machine that is busy with other work.

SMALL = model.Config(layers=2, width=8, heads=2, hidden=12, vocabulary=11, sequence=12, chunk=4, window=6,
                     inner_lr=0.5, dtype="float64", checkpoint_every=2)

# The flags of runs that end in seconds.
TINY = ("--layers=2", "--width=8", "--heads=1", "--hidden=8", "--sequence=32", "--chunk=8", "--window=16", "--batch=8",
        "--held-out=4")


def draw(config: model.Config, batch: int = 2) -> tuple[model.Weights, jax.Array]:
    """Weights in the configuration's dtype, all of them away from zero and one, and tokens."""
    random = np.random.default_rng(1)
    weights = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * random.standard_normal(x.shape), config.dtype),
                           model.init_weights(config, 0))
    return weights, jnp.asarray(random.integers(config.vocabulary, size=(batch, config.sequence + 1)), jnp.int32)


# The model.


def plain_losses(weights: model.Weights, tokens: jax.Array, config: model.Config) -> jax.Array:
    """`model.sequence_losses` with Python loops, lists of keys and values, and attention that stores its scores."""
    losses, fast, histories = [], weights["fast"], [[] for _ in range(config.layers)]
    lower = [jax.tree.map(lambda x, i=i: x[i], weights["lower"]) for i in range(config.layers - config.fast_layers)]

    def forward(fast, chunk, begin, histories):
        x = weights["embedding"][chunk[:-1]] * config.width ** 0.5
        positions, after = begin + np.arange(config.chunk), []
        blocks = [(block, None) for block in lower] + list(zip(weights["upper"], fast, strict=True))
        for (block, mlp), history in zip(blocks, histories, strict=True):

            def attend(query, key, value, history=history):
                keys, values = (jnp.concatenate(x) for x in zip(*history, (key, value), strict=True))
                t, s = positions[:, None], np.arange(begin + config.chunk)
                seen = (s <= t) & (s > t - config.window)
                return plain.attention(query, keys, values, visible=seen)[0], [*history, (key, value)]

            x, held = model.block(block, mlp, x, positions, attend, config.rope_base)
            after.append(held)
        log_probabilities = jax.nn.log_softmax(model.logits_of(weights, x))
        return -log_probabilities[np.arange(config.chunk), chunk[1:]], after

    for begin in range(0, config.sequence, config.chunk):
        chunk = tokens[begin:begin + config.chunk + 1]
        gradient = jax.grad(lambda fast, held=(chunk, begin, histories): forward(fast, *held)[0].mean())(fast)
        now, histories = forward(fast, chunk, begin, histories)
        norm = jnp.sqrt(sum(jnp.sum(g ** 2) for g in jax.tree.leaves(gradient)))
        rate = config.inner_lr / jnp.maximum(norm, 1.0)
        fast = jax.tree.map(lambda w, g, rate=rate: w - rate * g, fast, gradient)
        losses.append(now)
    return jnp.concatenate(losses)


@pytest.mark.usefixtures("float64")
def test_the_meta_gradient_equals_that_of_loops_and_plain_attention():
    weights, tokens = draw(SMALL)

    def ours(weights):
        losses = model.batch_losses(weights, tokens, SMALL)
        return jnp.mean(losses), losses

    def exact(weights):
        losses = jax.vmap(lambda row: plain_losses(weights, row, SMALL))(tokens)
        return jnp.mean(losses), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(weights)
    (_, exact_losses), exact_gradient = jax.jit(jax.value_and_grad(exact, has_aux=True))(weights)
    np.testing.assert_allclose(losses, exact_losses, rtol=1e-11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11), gradient, exact_gradient)
    frozen = model.batch_losses(weights, tokens, dataclasses.replace(SMALL, inner_lr=0.0))
    assert (np.abs(frozen - losses)[:, SMALL.chunk:] > 1e-6).any(axis=1).all()  # The steps do something.


@pytest.mark.usefixtures("float64")
def test_without_a_learning_rate_chunks_equal_the_whole_sequence():
    weights, tokens = draw(SMALL)

    def losses_and_gradient(config):
        def loss(weights):
            losses = model.batch_losses(weights, tokens, config)
            return jnp.mean(jnp.sin(losses)), losses

        (_, losses), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
        return losses, gradient

    chunked, gradient = losses_and_gradient(dataclasses.replace(SMALL, inner_lr=0.0))
    window, window_gradient = losses_and_gradient(dataclasses.replace(SMALL, mode="window"))
    np.testing.assert_allclose(chunked, window, rtol=1e-11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11), gradient, window_gradient)
    full = model.batch_losses(weights, tokens, dataclasses.replace(SMALL, mode="full"))
    np.testing.assert_allclose(chunked[:, :SMALL.window], full[:, :SMALL.window], rtol=1e-11)
    assert (np.abs(chunked - full)[:, SMALL.window:] > 1e-9).all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["ttt", "window"])
@pytest.mark.parametrize("prompt", [1, 4, 5, 7])
def test_decoding_token_by_token_predicts_what_training_does(mode, prompt):
    config = dataclasses.replace(SMALL, mode=mode)
    weights, tokens = draw(config, batch=1)
    expected = model.sequence_losses(weights, tokens[0], config)
    reader, buffer, logits = reading.read_prompt(weights, tokens[0, :prompt], config)
    losses = []
    for t in range(prompt, config.sequence + 1):
        losses.append(-jax.nn.log_softmax(logits)[tokens[0, t]])
        if int(buffer.length) == config.chunk:
            reader = reading.learn_chunk(weights, reader, tokens[0, t - config.chunk:t + 1], config)
            buffer = buffer._replace(length=jnp.int32(0))
        buffer, logits = reading.read_tokens(weights, reader, buffer, tokens[0, t:t + 1], jnp.int32(1), config)
    np.testing.assert_allclose(losses, expected[prompt - 1:], rtol=1e-5)  # Logits are float32.


def test_the_benchmarks_own_attention_computes_the_same():
    random = np.random.default_rng(0)
    query, key, value, *held = (jnp.asarray(random.standard_normal((T, 2, 4)), jnp.float32) for T in (4, 4, 4, 6, 6))
    for length in (0, 5, 6):
        cache = jttt.KeyValueCache(*held, jnp.int32(length))
        ours, theirs = (attend(query, key, value, cache) for attend in benchmark.ATTENTIONS.values())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)


def test_the_benchmarks_cells_run():
    flags = benchmark.build_parser().parse_args(["--scale", "256", "--iters", "1", "--repeats", "1"])
    cells = [cell for part in flags.parts for cell in benchmark.cells_of(part)]
    assert cells == ["8192-4-jttt", "8192-4-xla", "32768-1-jttt", "131072-1-jttt", "reading"]
    ours, step = (next(benchmark.run_cell(flags, f"8192-4-{attention}")) for attention in ("jttt", "xla"))
    assert (step["attention"], step["sequence"], step["batch"], step["failure"]) == ("xla", 32, 4, None)
    for found in ("loss", "gradient_norm"):
        np.testing.assert_allclose(step[found], ours[found], rtol=1e-5)
    lengths = list(benchmark.run_cell(flags, "reading"))
    assert [row["tokens"] for row in lengths] == [32, 64, 128, 256, 512]
    table = harness.describe_run("benchmarks.ttt_e2e", [], jax.devices()[0]) | {"steps": [step], "reading": lengths}
    benchmark.print_report(table)


def test_the_benchmarks_model_is_of_the_papers_size():
    shapes = jax.eval_shape(lambda: model.init_weights(dataclasses.replace(benchmark.PAPER, vocabulary=8), 0))
    embedding = (benchmark.PAPER.vocabulary - 8) * benchmark.PAPER.width
    assert 110e6 < model.parameter_count(shapes) + embedding < 112e6


# The data.


def test_batches_depend_on_seed_and_step_alone():
    documents = [np.arange(40, dtype=np.uint8), np.arange(100, 111, dtype=np.uint8)]
    first = data.batch(documents, 10, 64, seed=3, step=7)
    np.testing.assert_array_equal(first, data.batch(documents, 10, 64, seed=3, step=7))
    assert (first != data.batch(documents, 10, 64, seed=3, step=8)).any()
    assert (np.diff(first.astype(int), axis=1) == 1).all()
    begins = set(data.batch(documents, 10, 2000, seed=0, step=0)[:, 0].tolist())
    assert begins == {*range(31), 100, 101}


def test_passages_do_not_overlap_and_no_copy_is_held_out_from_itself(tmp_path):
    for name, content in {"a": range(50), "copy": range(50), "b": range(50, 75), "c": range(1)}.items():
        (tmp_path / name).write_bytes(bytes(content))
    corpus = data.load([tmp_path], 10)
    assert sorted(len(x) for part in corpus for x in part) == [25, 50]
    assert len(corpus.held_out) == 1
    cut = data.passages([np.arange(50, dtype=np.uint8), np.arange(50, 75, dtype=np.uint8)], 10, 100)
    np.testing.assert_array_equal(cut[:, 0], [0, 10, 20, 30, 40, 50, 60])
    assert len(data.passages([np.arange(50, dtype=np.uint8)], 10, 3)) == 3


# The commands.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file go; `data` in it holds a few files."""
    folder = tmp_path_factory.mktemp("ttt_e2e")
    (folder / "data").mkdir()
    for name in ("one", "two", "three", "four"):
        (folder / "data" / f"{name}.txt").write_text(f"the file {name} says {name}\n" * 20)
    return folder


def command(folder: Path, out: str, *flags: str) -> list[str]:
    """Flags of a run into a folder of that name."""
    return [*TINY, "--data", str(folder / "data"), "--out", str(folder / out), *flags]


def start(folder: Path, out: str, *flags: str, devices: int = 1) -> subprocess.Popen[str]:
    """Starts the command; what runs have in common is compiled once."""
    cheap = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "examples.ttt_e2e.train", *command(folder, out, *flags)],
        env=os.environ | cheap | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Waits for the command's end, and returns what it printed."""
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == status, errors
    return output + errors


def metrics(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


STEPS = ("--steps=60", "--save-every=4")


@pytest.fixture(scope="module")
def completed(folder: Path) -> Path:
    """A run that went to its end."""
    output = finish(start(folder, "tiny-ttt", *STEPS))
    assert re.search(r"^ +all +\d\.\d{4}$", output, re.M), output
    return folder / "tiny-ttt"


def test_a_run_leaves_its_files(completed):
    assert [row["step"] for row in metrics(completed)] == list(range(1, 61))
    assert (completed / "curves.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    with (completed / "loss_by_position.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 32
    assert checkpoints.Checkpoints(completed).latest() == 60


def test_a_killed_run_resumes_to_the_same_numbers(completed, folder):
    killed = folder / "killed"
    process = start(folder, "killed", *STEPS)
    deadline = time.monotonic() + PATIENCE
    while not (killed / "checkpoints" / "4").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert not (killed / "loss_by_position.csv").exists()
    assert re.search(r"going on from step \d+", finish(start(folder, "killed", *STEPS)))
    for name in ("metrics.csv", "loss_by_position.csv"):
        assert (killed / name).read_bytes() == (completed / name).read_bytes()


def test_two_devices_learn_what_one_does(completed, folder):
    finish(start(folder, "sharded", *STEPS, "--no-checkpoint", devices=2))
    ours, exact = ([row["loss"] for row in metrics(x)] for x in (folder / "sharded", completed))
    np.testing.assert_allclose(ours, exact, rtol=1e-3)


def test_a_run_goes_on_only_as_it_began(completed, folder, capsys):
    with pytest.raises(SystemExit):
        train.main(command(folder, completed.name, *STEPS, "--inner-lr=0.5"))
    assert "inner_lr was 1.0 and is 0.5" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(folder, capsys):
    status = train.main(command(folder, "diverged", "--steps=30", "--save-every=1", "--learning-rate=1e25"))
    assert status == 1
    assert re.search(r"stopped at step \d+: .*expected finite numbers. The last checkpoint", capsys.readouterr().err)
    config, weights = generate.load(folder / "diverged")
    assert config.sequence == 32
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights))


def test_generation(completed, folder, capsysbinary):
    prompt = folder / "data" / "one.txt"
    assert generate.main([str(completed), "--prompt", str(prompt), "--bytes=20"]) == 0
    assert len(capsysbinary.readouterr().out) == 20


def test_generation_needs_a_checkpoint(completed, tmp_path, capsys):
    config = (completed / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), "--text=a"])
    assert "has no checkpoint yet: expected a run without --no-checkpoint" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_comparison(completed, folder, capsys):
    assert compare.main([str(completed), str(completed), "--out", str(folder / "compared" / "picture.png")]) == 0
    assert (folder / "compared" / "picture.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert "tiny-ttt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main([str(folder / "data")])
    assert "expected the folder of a finished run" in capsys.readouterr().err


# Errors, before anything is compiled.


@pytest.mark.parametrize(("flags", "message"), [
    (["--sequence=30"], "sequence was 30: expected a multiple of chunk = 8"),
    (["--window=7"], "window was 7: expected at least chunk = 8"),
    (["--layers=1"], "layers was 1: expected at least 2"),
    (["--heads=3"], "width was 8: expected an even multiple of heads = 3"),
    (["--batch=0"], f"batch was 0: expected at least 1 and a multiple of the devices, {jax.device_count()}"),
    (["--learning-rate=-1"], "learning-rate was -1.0: expected a finite number over 0"),
    (["--learning-rate=nan"], "learning-rate was nan: expected a finite number over 0"),
    (["--inner-lr=-1"], "inner_lr was -1.0: expected a finite number, at least 0"),
    (["--steps=0"], "steps was 0: expected at least 1"),
    (["--data=/nowhere/at/all"], "No such file or directory: '/nowhere/at/all'"),
    (["--sequence=80000"], "expected two different files or more of at least 80001 bytes"),
])
def test_what_cannot_run_is_refused(flags, message, folder, monkeypatch, capsys):
    monkeypatch.delattr(train, "train")
    with pytest.raises(SystemExit) as stop:
        train.main(command(folder, "refused", *flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_empty_files_are_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(train, "train")
    for name in "ab":
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SystemExit):
        train.main(command(folder, "refused", f"--data={tmp_path}"))
    assert "0 of 2 are that long" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(folder, tmp_path, monkeypatch, capsys):
    """By errors of opening it, and by those of reading, which do not name it themselves."""
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.delattr(train, "train")
    monkeypatch.setattr(Path, "read_bytes", fail)
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit):
        train.main(command(folder, "refused", f"--data={tmp_path}"))
    assert f"Input/output error: '{tmp_path / 'broken'}'" in capsys.readouterr().err


def test_a_machine_without_orbax(folder, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "orbax", None)
    monkeypatch.delattr(train, "train")
    with pytest.raises(SystemExit):
        train.main(command(folder, "refused"))
    assert "pip install orbax-checkpoint, or pass --no-checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    (["--text="], "--text is empty: expected at least one byte"),
    (["--text=a"], "has no config.json: expected the folder of a run"),
])
def test_nothing_to_generate_from(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        generate.main([str(tmp_path), *flags])
    assert message in capsys.readouterr().err
