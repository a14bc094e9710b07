"""What masks cost, and what they save: each pass under one mask beside the same pass under another.

    python -m benchmarks.masks                    # on a GPU; writes benchmarks/results/masks-<device>.json
    python -m benchmarks.masks --scale 0.03 --iters 1 --repeats 1     # a try-out on a CPU, on plain formulas

Two comparisons, on random data, medians of one run:

  window   a causal window of 1024 beside full causal attention at T = 32768 (16 heads of 64, bfloat16)
  chunk    a dense boolean [1024, 9216] mask of which half is visible, beside the same attention told by
           key_start and key_end (12 heads of 64, bfloat16): 1024 queries on a cache of 8192 keys and themselves
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from jttt import dot_product_attention

PASSES = ("forward", "gradient", "order two")


def pass_of(name: str, attention: Callable) -> Callable:
    """A function of (visibility, query, key, value, d_output, t_query, t_key, t_value) that runs up to one pass.

    The gradient runs the forward and its own kernels; order two the forward, whose output and
    log-sum-exp it needs, and its own.
    """

    def run(visibility, query, key, value, d_output, *direction):
        def forward(*inputs):
            return attention(*inputs, **visibility)

        def gradient(*arrays):
            *inputs, d_output = arrays
            return jax.vjp(forward, *inputs)[1](d_output)

        if name == "forward":
            return forward(query, key, value)
        if name == "gradient":
            return gradient(query, key, value, d_output)
        return jax.vjp(gradient, query, key, value, d_output)[1](direction)

    return run


def comparisons(scale: float) -> Iterator[tuple[str, tuple[int, int, int, int], dict[str, tuple[dict, dict]]]]:
    """(name, (T, S, N, H), {variant: (static arguments, arrays)}); `scale` shrinks lengths for a try-out."""
    T = int(32768 * scale)
    window = max(1, T // 32)
    yield "window", (T, T, 16, 64), {
        "causal": ({"is_causal": True}, {}),
        "window": ({"is_causal": True, "local_window_size": (window - 1, 0)}, {})}

    T = int(1024 * scale)
    S = 9 * T
    # A cache of 8T keys whose last 4T are filled, then the chunk itself, causal: half of all entries.
    start, end = np.full((1, 1), 4 * T, np.int32), np.arange(T, dtype=np.int32)[None] + 8 * T + 1
    keys = np.arange(S)
    visible = jnp.asarray((keys >= start[0, 0]) & (keys < end[0][:, None]))
    yield "chunk", (T, S, 12, 64), {
        "ranges": ({}, {"key_start": jnp.asarray(start), "key_end": jnp.asarray(end)}),
        "mask": ({}, {"mask": visible})}


def inputs(shape: tuple[int, int, int, int], sets: int, seed: int) -> list[tuple[jax.Array, ...]]:
    T, S, N, H = shape
    generator = np.random.default_rng(seed)
    lengths = (T, S, S, T, T, S, S)
    return [tuple(jnp.asarray(generator.standard_normal((1, length, N, H), np.float32), jnp.bfloat16)
                  for length in lengths) for _ in range(sets)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the lengths (default: 1)")
    harness.add_run_flags(parser, warmup=2)
    arguments, device = harness.parse(parser, sys.argv[1:])
    report: dict[str, Any] = harness.describe_run("benchmarks.masks", sys.argv[1:], device) | {"results": []}

    def measured(comparison: str, shape: tuple[int, int, int, int], variants: dict, name: str) -> Iterator[dict]:
        sets, base = inputs(shape, 2, arguments.seed), None
        for variant, (static, arrays) in variants.items():
            attention = functools.partial(dot_product_attention, **static)
            x = harness.measure(pass_of(name, attention), [(arrays, *x) for x in sets], iters=arguments.iters,
                                warmup=arguments.warmup, repeats=arguments.repeats)
            base = base or x.milliseconds
            yield {"comparison": comparison, "shape": shape, "variant": variant, "pass": name,
                   "milliseconds": x.milliseconds, "spread": x.spread, "ratio": x.milliseconds / base}

    tasks = [harness.Task("results", f"{comparison} {name}",
                          functools.partial(measured, comparison, shape, variants, name))
             for comparison, shape, variants in comparisons(arguments.scale) for name in PASSES]
    out = arguments.out or harness.default_out("masks", device)
    harness.run(tasks, report, out, device)
    print(harness.format_table(["comparison", "pass", "variant", "ms", "spread", "ratio"], [
        [row["comparison"], row["pass"], row["variant"], f"{row['milliseconds']:.3f}", f"{row['spread']:.3f}",
         f"{row['ratio']:.3f}"] for row in report["results"]]))


if __name__ == "__main__":
    main()
