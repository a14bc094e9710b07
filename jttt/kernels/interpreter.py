"""Kernels on the host, through Triton's interpreter."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import jax
import numpy as np
import triton

# The interpreter replaces functions of `triton.language` while it runs.
_lock = threading.Lock()


def has(kernel: Any) -> bool:
    """Whether a kernel was defined under TRITON_INTERPRET=1."""
    return not isinstance(kernel, triton.JITFunction)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], outputs: dict[str, jax.ShapeDtypeStruct]
        ) -> dict[str, jax.Array]:
    """Runs a kernel on a grid of programs, inside a jitted computation; returns its outputs by name.

    Arguments are by the kernel's parameters, arrays or not; outputs are the parameters that they lack.
    """
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype")}
    others = {name: x for name, x in arguments.items() if name not in arrays}

    def on_host(*operands):
        made = [np.full(x.shape, np.nan, x.dtype) for x in outputs.values()]
        inputs = [np.ascontiguousarray(x) for x in operands]
        tensors = {name: HostTensor(x) for name, x in
                   zip([*arrays, *outputs], [*inputs, *made], strict=True)}
        with _lock:
            kernel[grid](**tensors, **others)
        return tuple(made)

    results = jax.pure_callback(on_host, tuple(outputs.values()), *arrays.values())
    return dict(zip(outputs, results, strict=True))


class HostTensor:
    """A numpy array that looks enough like a torch tensor for Triton's interpreter."""

    DTYPES: ClassVar = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "int64": "i64",
                        "int8": "i8", "bool": "i1"}

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = self.DTYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> HostTensor:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def cpu(self) -> HostTensor:
        return self

    def copy_(self, other: HostTensor) -> None:
        pass

    def new_empty(self, size: int, device: str) -> HostTensor:
        return HostTensor(self.array)

    def set_(self, *storage) -> None:
        pass
