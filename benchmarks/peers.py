"""Other libraries' attention, each measured by its own means: what is compared in `benchmarks.compare`.

A peer says why it cannot run, or measures one pass of one problem. The passes are those of `workload`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import harness, workload
from benchmarks.harness import Measurement
from benchmarks.workload import Attention, Case


class Peer(NamedTuple):
    """One attention. `absent(device)` is the reason why it cannot run, or None."""

    name: str
    what: str
    absent: Callable[[jax.Device], str | None]
    measure: Callable[[Case, str, argparse.Namespace], Measurement]


def peers() -> list[Peer]:
    """Everything that is compared, jttt first."""
    return [
        Peer("jttt", "jttt.dot_product_attention", _needs_gpu, _in_jax(workload.IMPLEMENTATIONS["triton"])),
        Peer("xla", 'jax.nn.dot_product_attention(implementation="xla")', lambda device: None,
             _in_jax(workload.IMPLEMENTATIONS["xla"])),
        Peer("cudnn", 'jax.nn.dot_product_attention(implementation="cudnn")', _needs_gpu,
             _in_jax(workload.IMPLEMENTATIONS["cudnn"])),
        Peer("tokamax", "tokamax.dot_product_attention", _needs("tokamax"), _in_jax(_tokamax)),
        Peer("torch-math", "PyTorch's scaled_dot_product_attention, math", _needs("torch"),
             functools.partial(_in_torch, "MATH")),
        Peer("torch-flash", "PyTorch's scaled_dot_product_attention, flash", _torch_with_gpu,
             functools.partial(_in_torch, "FLASH_ATTENTION")),
    ]


def _needs_gpu(device: jax.Device) -> str | None:
    return None if device.platform == "gpu" else f"it needs an NVIDIA GPU and this is {device}"


def _needs(module: str) -> Callable[[jax.Device], str | None]:
    def absent(device: jax.Device) -> str | None:
        try:
            importlib.import_module(module)
        except ImportError:
            return "it is not installed"
        return None

    return absent


def _torch_with_gpu(device: jax.Device) -> str | None:
    return _needs_gpu(device) or _needs("torch")(device)


def _in_jax(implementation: Callable[..., jax.Array]) -> Callable[..., Measurement]:
    def measure(case: Case, pass_name: str, flags: argparse.Namespace) -> Measurement:
        attention: Attention = functools.partial(implementation, causal=case.causal)
        return harness.measure(
            workload.PASSES[pass_name](attention), workload.rotating_inputs(case, flags.seed),
            iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats)

    return measure


def _tokamax(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(query, key, value, is_causal=causal)


def _in_torch(backend: str, case: Case, pass_name: str, flags: argparse.Namespace) -> Measurement:
    """A pass of PyTorch's attention, eager as PyTorch is: timed like the others, memory as PyTorch counts it."""
    import torch
    from torch.nn import attention as choice
    from torch.nn.functional import scaled_dot_product_attention

    gpu = torch.cuda.is_available() and flags.device != "cpu"
    device = torch.device("cuda" if gpu else "cpu")
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    generator = torch.Generator(device).manual_seed(flags.seed)

    def draw(heads: int) -> Any:
        # PyTorch's axes are [B, heads, T, H].
        return torch.randn(case.b, heads, case.t, case.h, device=device, generator=generator,
                           dtype=getattr(torch, case.dtype)).requires_grad_()

    def mean(x: Any, power: int) -> Any:
        total = (x.float() ** power).sum()
        return total if case.dtype == "float16" else total / x.numel()

    def launch(*inputs: Any) -> Sequence[Any]:
        with choice.sdpa_kernel(getattr(choice.SDPBackend, backend)):
            output = scaled_dot_product_attention(*inputs, is_causal=case.causal, enable_gqa=case.k != case.n)
            if pass_name == "forward":
                return [output.detach()]
            meta = pass_name == "meta-gradient"
            gradients = torch.autograd.grad(mean(output, 1), inputs, create_graph=meta)
            return torch.autograd.grad(sum(mean(x, 2) for x in gradients), inputs) if meta else gradients

    sets = [tuple(draw(heads) for heads in (case.n, case.k, case.k))
            for _ in range(workload.rotation(case))]
    try:
        launch(*sets[0])
        synchronize()
        temporary_bytes = None
        if gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            outputs = launch(*sets[0])
            synchronize()
            made = sum(x.numel() * x.element_size() for x in outputs)
            temporary_bytes = torch.cuda.max_memory_allocated() - before - made
            del outputs
        times = harness.time_launches(
            launch, sets, iters=flags.iters, warmup=flags.warmup, repeats=flags.repeats, wait=lambda _: synchronize())
        return dataclasses.replace(harness.summary(times), temporary_bytes=temporary_bytes)
    finally:
        del sets
        if gpu:
            torch.cuda.empty_cache()
