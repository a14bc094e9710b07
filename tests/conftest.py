"""Without a GPU, kernels run through Triton's interpreter; tests marked `gpu` skip and say so."""

import os

import jax
import pytest


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


if not _has_gpu():
    # Before anything imports Triton: it reads this when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 8.0 or newer")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
