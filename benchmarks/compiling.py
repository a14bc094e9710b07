"""How the programs of a benchmark are compiled side by side: worker processes lower them, threads compile them.

Tracing is Python, and so is much of Triton's compiler; Python runs one thread at a time. So programs for a GPU are
lowered by processes, which do not touch it, and come back exported (`jax.export`): the StableHLO that `jax.jit`
would make here, with the PTX of its kernels. XLA does run side by side, on threads of this process. Programs for a
CPU have no kernels and are lowered in no time; that is done here, as it is where a program cannot be exported.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import flatbuffers  # noqa: F401 - jax.export writes with it, and would miss it only after all was lowered
import jax
from tqdm import tqdm

from benchmarks import harness
from jttt import passes

# The function of a program, and the shapes and dtypes of its arguments.
type Build[P] = Callable[[P], tuple[Callable, tuple]]

BAR = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"


def compile_all[P: Hashable](programs: Sequence[P], build: Build[P], group: Callable[[P], Hashable], workers: int,
                             device: jax.Device) -> dict[P, jax.stages.Compiled | str]:
    """Every program, compiled for `device`, or the reason why it is not; two bars show how far it is.

    Args:
      programs: whatever `build` takes. Processes are sent both, so `build` is a module's own function.
      build: the function of a program, and its arguments as `jax.ShapeDtypeStruct`.
      group: programs for which it returns the same are lowered by one process, which makes a kernel once however
        many of them launch it; None stands for what cannot be exported (cuDNN's attention).
      workers: how many processes there are at most, and how many threads.
      device: where the programs will run.
    """
    compiled: dict[P, jax.stages.Compiled | str] = {}
    jobs = {}
    with _cancelled_at_the_end(concurrent.futures.ThreadPoolExecutor(workers)) as threads, \
            _cancelled_at_the_end(worker_processes(workers, passes.compute_capability())) as processes:
        lowered = _lower_all(programs, build, group, processes, device)
        for program, compile_one in tqdm(lowered, total=len(programs), desc="lowering ", bar_format=BAR):
            if isinstance(compile_one, str):
                compiled[program] = compile_one
            else:
                jobs[threads.submit(_caught, compile_one)] = program, compile_one
        done = concurrent.futures.as_completed(jobs)
        for job in tqdm(done, total=len(jobs), desc="compiling", bar_format=BAR):
            compiled[jobs[job][0]] = job.result()
    for program, compile_one in jobs.values():
        if isinstance(compiled[program], str):  # Perhaps for want of memory that others had taken.
            compiled[program] = _caught(compile_one)
    return compiled


def _lower_all[P: Hashable](
    programs: Sequence[P], build: Build[P], group: Callable[[P], Hashable], processes: concurrent.futures.Executor,
    device: jax.Device,
) -> Iterator[tuple[P, Callable[[], jax.stages.Compiled] | str]]:
    """Each program with what compiles it, or the reason why nothing can, as they are lowered."""
    here, groups = [], {}
    for program in programs:
        name = group(program) if device.platform == "gpu" else None
        (here if name is None else groups.setdefault(name, [])).append(program)
    jobs = {processes.submit(export_all, members, build): members for members in groups.values()}
    for program in here:
        lowered = _caught(lambda program=program: lower(build, program, device))
        yield program, lowered if isinstance(lowered, str) else lowered.compile
    for job in concurrent.futures.as_completed(jobs):
        # What all have in common is a process that died.
        members, error = jobs[job], job.exception()
        exported = [harness.reason(error)] * len(members) if error else job.result()
        for program, each in zip(members, exported, strict=True):
            yield program, each if isinstance(each, str) else functools.partial(compile_exported, each, device)


def lower[P](build: Build[P], program: P, device: jax.Device) -> jax.stages.Lowered:
    """A program, ready to be compiled for `device`."""
    function, arguments = build(program)
    with jax.default_device(device):
        return jax.jit(function).lower(*arguments)


def export_all[P](programs: Sequence[P], build: Build[P], platform: str = "cuda") -> list[bytes | str]:
    """Each program exported for a platform, or the reason why it is not."""
    # The call of a kernel is not among those of which JAX promises that later versions run them. This one does.
    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]

    def export(program: P) -> bytes:
        function, arguments = build(program)
        exported = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*arguments)
        return bytes(exported.serialize())

    return [_caught(functools.partial(export, program)) for program in programs]


def compile_exported(program: bytes, device: jax.Device) -> jax.stages.Compiled:
    """What `export_all` made of a program, compiled for `device`."""
    exported = jax.export.deserialize(program)
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    with jax.default_device(device):
        return jax.jit(exported.call).lower(*arguments).compile()


def add_workers_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that says how many compile."""
    parser.add_argument("--workers", type=harness.positive_int, default=min(8, os.cpu_count() or 1), metavar="W",
                        help="processes that lower and threads that compile (default: 8, or as many as there are "
                        "cores)")


def worker_processes(count: int, capability: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that make programs for GPUs of a compute capability, and touch none. They begin when there is work."""
    return concurrent.futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(capability,))


def _begin(capability: int) -> None:
    """Readies a worker."""
    # The compiler prints whole programs that it refuses. Errors come as results.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    jax.config.update("jax_platforms", "cpu")
    passes.compute_capability = lambda: capability  # It sees no GPU that it could ask.


@contextlib.contextmanager
def _cancelled_at_the_end[E: concurrent.futures.Executor](pool: E) -> Iterator[E]:
    """A pool that drops what it has not begun when it is left early, by an interruption say."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _caught(action: Callable[[], Any]) -> Any:
    """What `action` returns, or why it failed, as `harness.reason` puts it. (Not every exception can be sent.)"""
    try:
        return action()
    except Exception as error:
        return harness.reason(error)
