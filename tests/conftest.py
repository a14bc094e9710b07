"""Without a GPU, kernels run through Triton's interpreter; tests marked `gpu` skip and say so."""

import os

# Tuning XLA's own products takes most of a minute for each program that a kernel is compared with.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import hypothesis
import jax
import pytest

# Devices for the tests of sharding; everything else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


if not _has_gpu():
    # Before anything imports Triton: it reads this when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

# An example compiles for seconds, and what fails on one machine must fail on every other.
hypothesis.settings.register_profile("jttt", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jttt")


def pytest_collection_modifyitems(items):
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 8.0 or newer")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def float64():
    """Float64 arrays stay what they are for a whole module."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def cheap_compilation():
    """For a module of many small programs, whose time is nearly all compilation: do it roughly."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
