"""What worker processes lower is what `jax.jit` would have made here, and what they cannot has its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import gpu_triton

from benchmarks import compiling, sweep, targets, workload
from benchmarks.workload import Case
from jttt import passes

CPU = jax.devices("cpu")[0]
CASE = Case(b=2, t=8, n=3, k=3, h=4, dtype="float32", causal=True)


def build(program: str) -> tuple[Callable, tuple]:
    """A program of three kinds: one that works, one that does not, one that takes its process with it."""
    if program == "deadly":
        os._exit(1)
    if program == "faulty":
        raise ValueError("no such\nprogram")
    return jnp.sin, (jax.ShapeDtypeStruct((2,), "float32"),)


def test_a_worker_makes_the_program_that_jit_makes_here() -> None:
    cell = sweep.Cell(CASE, "xla", "math")
    order_two = targets.Program("order two", "jttt", CASE)
    with compiling.worker_processes(1, capability=75) as processes:
        assert processes.submit(passes.compute_capability).result() == 75
        exported = [processes.submit(compiling.export_all, [program], build, "cpu")
                    for program, build in ((cell, sweep.build), (order_two, targets.build))]
        exported = [job.result()[0] for job in exported]
    arrays = workload.draw(CASE, jax.random.key(0))
    prepared = targets.order_two_inputs(*workload.draw(CASE, jax.random.key(0), "qkvqqkv"))
    for program, direct, arguments in (
        (exported[0], compiling.lower(sweep.build, cell, CPU), arrays),
        (exported[1], compiling.lower(targets.build, order_two, CPU), prepared),
    ):
        direct, ours = direct.compile(), compiling.compile_exported(program, CPU)
        assert ours.memory_analysis().temp_size_in_bytes == direct.memory_analysis().temp_size_in_bytes
        jax.tree.map(np.testing.assert_array_equal, ours(*arguments), direct(*arguments))


def test_a_program_that_cannot_be_lowered_has_its_reason_and_the_others_are_compiled() -> None:
    compiled = compiling.compile_all(["good", "faulty"], build, str, 2, CPU)
    np.testing.assert_array_equal(compiled["good"](jnp.zeros(2)), jnp.zeros(2))
    assert compiled["faulty"] == "ValueError: no such"
    good, faulty = compiling.export_all(["good", "faulty"], build, "cpu")
    assert isinstance(good, bytes) and faulty == "ValueError: no such"


def test_what_a_dead_process_had_to_do_has_its_reason() -> None:
    gpu = SimpleNamespace(platform="gpu")
    compiled = compiling.compile_all(["deadly", "faulty"], build, lambda x: x if x == "deadly" else None, 1, gpu)
    assert compiled["deadly"].startswith("BrokenProcessPool")
    assert compiled["faulty"] == "ValueError: no such"  # Of no group: lowered in this process.


def test_compiling_is_tried_again_when_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def compile_one() -> str:
        tries.append(len(tries))
        if len(tries) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 TiB")
        return SimpleNamespace()

    monkeypatch.setattr(compiling, "lower", lambda *_: SimpleNamespace(compile=compile_one))
    compiled = compiling.compile_all(["good"], build, str, 1, CPU)
    assert compiled == {"good": SimpleNamespace()} and len(tries) == 2


def test_what_has_the_same_kernels_is_lowered_together() -> None:
    cells = {(mode, t): sweep.kernels_of(sweep.Cell(Case(**vars(CASE) | {"t": t}), mode, mode))
             for mode in ("triton", "save_p") for t in (8, 16)}
    assert cells["save_p", 8] == cells["save_p", 16] and len(set(cells.values())) == 3
    programs = [targets.Program("meta-gradient", who, Case(**vars(CASE) | {"t": t, "n": n, "k": n}))
                for who in ("jttt", "cudnn") for n in (1, 2) for t in (8, 16)]
    one_8, one_16, two_8, two_16, *cudnn = map(targets.kernels_of, programs)
    assert one_8 != one_16 and two_8 == two_16 and cudnn == [None] * 4


SAME_KERNELS = """
import re

import jax

from benchmarks import compiling, sweep, workload

for name in ("triton", "save_p_triton_full"):
    case = workload.Case(b=1, t=512, n=1, k=1, h=64, dtype="float16", causal=True)
    function, arguments = sweep.build(sweep.Cell(case, name, name))
    here = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    [program] = compiling.export_all([sweep.Cell(case, name, name)], sweep.build)
    there = jax.export.deserialize(program).mlir_module()
    calls = [re.findall(r'stablehlo.custom_call @triton_kernel_call_ffi.*?opaque = "([^"]*)"', x)
             for x in (here, there)]
    print(name, len(calls[0]), len(set(calls[0])), calls[0] == calls[1])
"""


@pytest.mark.skipif(not hasattr(gpu_triton, "TritonKernel"), reason="needs JAX's CUDA plugin")
def test_an_exported_program_has_the_kernels_that_jit_gives_it() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SAME_KERNELS], cwd=Path(__file__).parents[1], capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names, counts, _, same = zip(*map(str.split, done.stdout.splitlines()), strict=True)
    assert names == ("triton", "save_p_triton_full") and min(map(int, counts)) > 2
    assert same == ("True", "True")
