"""Programs that are made before they run: exported, lowered, compiled, cached."""

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import gpu_triton

import jttt
from jttt.kernels import cost, launch
from jttt.kernels.config import Blocks
from jttt.spec import Band
from tests import plain

ROOT = Path(__file__).parents[1]

# Exports a meta-gradient for CUDA and writes its program. Under jax.checkpoint where a policy is named.
EXPORT = """
import sys

import jax
import jax.numpy as jnp
from jax import export

import jttt

def loss(*x):
    return jnp.sum(jnp.sin(jttt.dot_product_attention(*x, is_causal=True).astype(jnp.float32)))

def meta(*x):
    return sum(jnp.sum(jnp.sin(g.astype(jnp.float32))) for g in jax.grad(loss, (0, 1, 2))(*x))

_, policy, platforms = sys.argv
if policy == "names":
    loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(
        "attention_output", "attention_lse"))
elif policy == "nothing":
    loss = jax.checkpoint(loss)
x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
exported = export.export(
    jax.jit(jax.grad(meta, (0, 1, 2))), platforms=platforms.split(","),
    disabled_checks=[export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")])(x, x, x)
print(exported.mlir_module())
"""


def run(program, *arguments, **environment):
    """Runs a program on the CPU in a process of its own, without Triton's interpreter unless it is asked for."""
    without = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=without | {"JAX_PLATFORMS": "cpu"} | environment)


def output(*arguments, **environment):
    done = run(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels_called(module):
    """Names of the kernels in the text of a module; jax-triton compresses what it says of them."""
    calls = re.findall(r'opaque = "((?:[^"\\]|\\.)*)"', module)
    plain_bytes = [re.sub(rb'\\([0-9A-F]{2}|.)', lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1],
                          call.encode()) for call in calls]
    return [re.search(rb"jttt_(\w+_kernel)", zlib.decompress(call))[1].decode() for call in plain_bytes]


HAS_CUDA_PLUGIN = hasattr(gpu_triton, "TritonKernel")
META_GRADIENT = ["forward_kernel", "d_query_kernel", "d_key_value_kernel", "tangent_kernel", "g_query_kernel",
                 "g_key_value_kernel", "d_query_kernel", "d_key_value_kernel"]


@pytest.mark.oldest
@pytest.mark.skipif(not HAS_CUDA_PLUGIN, reason="needs JAX's CUDA plugin, though no GPU")
@pytest.mark.parametrize(("policy", "platforms", "kernels"), [
    ("none", "cuda", META_GRADIENT), ("names", "cuda,cpu", META_GRADIENT),
    ("nothing", "cuda", ["forward_kernel", *META_GRADIENT])])
def test_export_for_cuda_without_a_gpu(policy, platforms, kernels):
    """With nothing saved, the forward runs in the inner backward sweep and again in the outer one; for its own
    sake it would run for the value of the loss, which nobody asks for."""
    module = output(EXPORT, policy, platforms)
    assert sorted(kernels_called(module)) == sorted(kernels)
    # Another process, where sets of names have another order, makes the same program: caches find it.
    assert module == output(EXPORT, policy, platforms, PYTHONHASHSEED="7")


@pytest.mark.skipif(HAS_CUDA_PLUGIN, reason="JAX's CUDA plugin is installed")
def test_export_for_cuda_without_the_plugin_says_what_to_install():
    assert "RuntimeError: JAX's CUDA plugin is not installed" in (done := run(EXPORT, "none", "cuda")).stderr
    assert "pip install 'jax[cuda13]'" in done.stderr


@pytest.mark.oldest
def test_export_for_cuda_under_the_interpreter_is_an_error():
    done = run(EXPORT, "none", "cuda", TRITON_INTERPRET="1")
    assert "RuntimeError: TRITON_INTERPRET was 1, but the computation is lowered for CUDA" in done.stderr


# On the CPU.

ARRAYS = plain.Problem(T=9, S=9, N=2, K=1, H=4, B=1).draw(np.float32)[0]


def meta_gradient(attention):
    def loss(*x):
        return jnp.sum(jnp.sin(attention(*x)))

    return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*x)), (0, 1, 2))


@pytest.mark.oldest
def test_lowered_compiled_exported_and_evaluated_in_shape():
    function = jax.jit(meta_gradient(jttt.dot_product_attention))
    expected = meta_gradient(lambda *x: plain.attention(*x)[0])(*ARRAYS)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
    assert [(x.shape, x.dtype) for x in jax.eval_shape(function, *shapes)] == [(x.shape, x.dtype) for x in shapes]
    compiled = function.lower(*shapes).compile()
    exported = jax.export.export(function, platforms=["cpu"])(*shapes)
    for results in (compiled(*ARRAYS), exported.call(*ARRAYS)):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.oldest
def test_exported_for_sizes_that_are_not_known_yet():
    shape = jax.export.symbolic_shape("b, t, 2, 4")
    query, key = (jax.ShapeDtypeStruct((*shape[:2], heads, 4), jnp.float32) for heads in (2, 1))
    exported = jax.export.export(jax.jit(meta_gradient(jttt.dot_product_attention)), platforms=["cpu"])(query, key, key)
    expected = meta_gradient(lambda *x: plain.attention(*x)[0])(*ARRAYS)
    for x, y in zip(exported.call(*ARRAYS), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


CACHED = """
import jax
import jax.numpy as jnp

import jttt

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

def loss(*x):
    return jnp.sum(jnp.sin(jttt.dot_product_attention(*x, is_causal=True)))

x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
meta = jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*x)), (0, 1, 2))
jax.jit(meta).lower(x, x, x).compile()
print([hits.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses")])
"""


@pytest.mark.oldest
def test_a_second_process_finds_the_program_in_the_compilation_cache(tmp_path):
    cache = dict(JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
    assert output(CACHED, PYTHONHASHSEED="1", **cache) == "[0, 1]\n"
    assert output(CACHED, PYTHONHASHSEED="2", **cache) == "[1, 0]\n"


# What a kernel says that it costs.


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(3, 2), Band(-2, None), Band(None, -40)], ids=str)
def test_the_visible_area_is_that_of_the_tiles_with_something_visible(band):
    T, S, blocks = 37, 53, Blocks(16, 8, 4, 2)
    t, s = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((T, S), bool)
    if band.left is not None:
        seen &= s >= t - band.left
    if band.right is not None:
        seen &= s <= t + band.right
    area = sum(tile.size for rows in np.split(seen, range(16, T, 16)) for tile in np.split(rows, range(8, S, 8), 1)
               if tile.any())
    assert area <= cost.visible_area(band, blocks, T, S) <= area * (1.2 if band.left is not None else 1)


@pytest.mark.parametrize("kernel", cost.PRODUCTS)
def test_products_are_those_of_the_design_note(kernel):
    """With everything there, the number of products is that of the table."""
    from benchmarks import tune

    if kernel in tune.PRODUCTS:
        arrays = {name: jax.ShapeDtypeStruct((1, 8, 1, 16), jnp.float32) for entry in cost.PRODUCTS[kernel]
                  for name in entry.split() if name != "scores"} | dict(query=(x := jax.ShapeDtypeStruct(
                      (1, 8, 1, 16), jnp.float32)), key=x)
        made = cost.estimate(kernel, arrays, Band(), Blocks(8, 8, 4, 2), 1)
        assert made["flops"] == tune.PRODUCTS[kernel] * 2 * 8 * 8 * 16
        assert made["bytes_accessed"] == len(arrays) * 8 * 16 * 4


def test_every_kernel_has_a_cost():
    assert set(cost.PRODUCTS) == {kernel.__name__ for entries in launch.KERNELS.values() for kernel, *_ in entries}
    assert all(name in kernel.arg_names or name == "scores" for entries in launch.KERNELS.values()
               for kernel, *_ in entries for entry in cost.PRODUCTS[kernel.__name__] for name in entry.split())


@pytest.mark.skipif(not HAS_CUDA_PLUGIN, reason="needs JAX's CUDA plugin, though no GPU")
def test_an_exported_kernel_tells_its_cost():
    module = output(EXPORT, "none", "cuda")
    costs = [json.loads(x.replace("\\22", '"')) for x in re.findall(r'cost_estimate_json = "([^"]*)"', module)]
    # [2, 512, 4, 64] in bfloat16, in tiles of 64 × 64, of which half and those on the diagonal are visible.
    forward = 2 * 2 * 64 * 2 * 4 * (512 * 512 + 512 * 64) // 2
    assert costs[0] == dict(flops=forward, bytes_accessed=4 * 2 * 512 * 4 * 64 * 2 + 2 * 4 * 512 * 4)
    assert len(costs) == len(META_GRADIENT)
