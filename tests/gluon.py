"""Kernels in Gluon on the host: their very source, on numpy arrays, with everything asynchronous as late as it may be.

A tile that the copy engine brings comes when its barrier is waited for, and until then its place holds NaN. A product
reads its operands when it is waited for. So a kernel that reads a tile too early, gives its place away too early, uses
a product too early, waits for the wrong barrier or leaves something on its way ends in NaN or in an error.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import triton

import jttt
from jttt import kernels
from jttt.kernels import blocks, hopper, interpreter
from jttt.kernels.config import Blocks

_SOURCES = Path(kernels.__file__).parent


@contextlib.contextmanager
def on_host(cut: Blocks | None = None) -> Iterator[set[str]]:
    """Kernels for Hopper take the place of those in plain Triton that the interpreter would run, with these blocks or
    those of the table. Yields the names of those that did."""
    taken: set[str] = set()
    otherwise, look_up = interpreter.run, blocks.choose

    def choose(kernel: str, width: int, itemsize: int, capability: int, dense: bool = False) -> Blocks:
        name = hopper.KERNELS[kernel][0].__name__ if kernel in hopper.KERNELS else kernel
        return cut or look_up(name, width, itemsize, 90, dense)

    def call(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        if kernel.__name__ not in hopper.KERNELS:
            return otherwise(kernel, grid, arguments, outputs)
        function, described = hopper.KERNELS[kernel.__name__]
        taken.add(function.__name__)
        arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype")}

        def compute(*operands: Any) -> tuple[np.ndarray, ...]:
            given = arguments | dict(zip(arrays, operands, strict=True))
            return tuple(run(function, grid, given, outputs, described).values())

        results = jax.pure_callback(compute, tuple(outputs.values()), *arrays.values())
        return dict(zip(outputs, results, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "run", call)
        # Triton's interpreter would have no bfloat16 products.
        patch.setattr(jttt.arguments, "check_implementation", lambda *_: None)
        patch.setattr(blocks, "choose", choose)
        yield taken


def run(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], outputs: dict[str, Any],
        described: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Runs a kernel on a grid of programs.

    Arguments are by the kernel's parameters, arrays or not; outputs, given by shape and dtype, are those that they
    lack. `described` names the arrays that reach it as tensor descriptors.
    """
    machine = Machine()
    machine.threads = 32 * arguments["C"].blocks.warps
    made = {name: np.full(x.shape, np.nan, x.dtype) for name, x in outputs.items()}

    def passed(name: str, x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        return Descriptor(np.asarray(x)) if name in described else Pointer(np.asarray(x).reshape(-1))

    parameters = {name: passed(name, x) for name, x in arguments.items()}
    parameters |= {name: Pointer(x.reshape(-1)) for name, x in made.items()}
    program = machine.load("hopper/" + kernel.__module__.split(".")[-1])[kernel.__name__]
    with np.errstate(all="ignore"):
        for machine.program in itertools.product(*map(range, grid)):
            machine.grid = grid
            program(**parameters)
            machine.check_that_nothing_is_left()
    return made


class Tile(np.ndarray):
    """What a program has in registers."""

    def to(self, dtype: Any) -> Tile:
        return np.asarray(self).astype(dtype).view(Tile)

    # What += makes is another tile, perhaps a larger one.
    def __iadd__(self, other: Any) -> Tile:
        return self + other

    def __isub__(self, other: Any) -> Tile:
        return self - other

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Tile:
        return array.view(Tile)


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


@dataclasses.dataclass
class Pointer:
    """Addresses in an array in memory."""

    array: np.ndarray
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.array.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset + offset)


@dataclasses.dataclass
class Descriptor:
    """An array `[…, length, heads, width]` that the copy engine knows."""

    array: np.ndarray
    layout: None = None

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def block(self, place: list[Any], shape: tuple[int, ...]) -> np.ndarray:
        """The part at a place, zeros outside of the array."""
        array = self.array.reshape(-1, *self.array.shape[-3:])
        block = np.zeros(shape, array.dtype)
        inside = array[tuple(slice(int(i), int(i) + size) for i, size in zip(place, shape, strict=True))]
        block[tuple(map(slice, inside.shape))] = inside
        return block


@dataclasses.dataclass
class Shared:
    """A piece of shared memory."""

    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return Shared(view)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Tile:
        return tile(self.array.copy())


class Barrier:
    """A barrier that counts the bytes of what arrives, from the copy engine (count 1) or from every thread."""

    def __init__(self) -> None:
        self.count, self.phase, self.expected, self.on_its_way = None, 0, None, []

    def expect(self, size: int) -> None:
        assert self.count and self.expected is None, "a barrier was armed twice"
        self.expected = size

    def wait(self, parity: int) -> None:
        if (self.phase - 1) % 2 == parity and self.phase:
            return
        size = sum(place.array.nbytes for place, _ in self.on_its_way)
        assert self.expected == size, f"waiting for {self.expected} bytes, {size} are on their way: this never ends"
        for place, block in self.on_its_way:
            place.array[...] = block()
        self.phase, self.expected, self.on_its_way = self.phase + 1, None, []


class Barriers:
    def __init__(self, shape: list[int]) -> None:
        self.barriers = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Product:
    """A product that was queued. There is nothing that can be done with it but to wait, and to add another to it."""

    def __init__(self, left: Any, right: Shared, acc: Any, use_acc: bool) -> None:
        self.operands, self.value = (left, right, acc, use_acc), None

    def make(self) -> None:
        left, right, acc, use_acc = self.operands
        acc = acc.value if isinstance(acc, Product) else acc
        product = _wide(left) @ _wide(right)
        self.value = tile(acc + product if use_acc else product)


def _wide(x: Tile | Shared) -> np.ndarray:
    return np.asarray(x.array if isinstance(x, Shared) else x).astype(np.float32)


class Machine:
    """One multiprocessor, and the modules of the kernels as they run on it."""

    def __init__(self) -> None:
        self.program, self.grid, self.threads = (0, 0), (1, 1), 0
        self.queued, self.copies, self.barriers, self.modules = [], [], [], {}
        language = types.SimpleNamespace(
            arange=lambda begin, end, layout=None: tile(np.arange(begin, end, dtype=np.int32)),
            zeros=lambda shape, dtype, layout=None: tile(np.zeros(shape, dtype)),
            program_id=lambda axis: tile(np.int32(self.program[axis])),
            num_programs=lambda axis: tile(np.int32(self.grid[axis])),
            load=_load, store=_store, sum=_sum, max=lambda x, axis: tile(np.max(x, axis)),
            exp2=np.exp2, log2=np.log2, maximum=np.maximum, minimum=np.minimum,
            where=_where,
            cdiv=lambda x, y: -(-x // y), static_range=range, constexpr=lambda x: x,
            float32=np.float32, int32=np.int32, int64=np.int64,
            allocate_shared_memory=self.allocate, convert_layout=lambda x, layout: x,
            NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
            num_warps=lambda: self.threads // 32, barrier=lambda: None)
        hopper = types.SimpleNamespace(
            warpgroup_mma=self.queue, warpgroup_mma_wait=self.wait, fence_async_shared=lambda: None,
            mbarrier=types.SimpleNamespace(
                MBarrierLayout=lambda: None, init=self.initialise,
                expect=lambda barrier, size, pred: barrier.expect(size) if pred else None,
                wait=lambda barrier, parity, pred=True: barrier.wait(int(parity)) if pred else None),
            tma=types.SimpleNamespace(async_load=self.bring))
        ampere = types.SimpleNamespace(async_copy=types.SimpleNamespace(
            async_load=self.copy, mbarrier_arrive=self.arrive))
        language.nvidia = types.SimpleNamespace(hopper=hopper, ampere=ampere)
        gluon = types.SimpleNamespace(jit=lambda function: function, language=language)
        self.triton = types.SimpleNamespace(
            jit=lambda function: function, constexpr_function=lambda function: function, language=language,
            next_power_of_2=triton.next_power_of_2, experimental=types.SimpleNamespace(gluon=gluon))

    def load(self, name: str) -> dict[str, Any]:
        """The names of a module of `jttt/kernels/`, such as "hopper/stream"."""
        if name not in self.modules:
            path = _SOURCES / f"{name}.py"
            module = {"__builtins__": {**vars(builtins), "__import__": self.find}, "__name__": name}
            exec(compile(path.read_text(), path, "exec"), module)
            self.modules[name] = module
        return self.modules[name]

    def find(self, name: str, globals: Any = None, locals: Any = None, names: tuple[str, ...] | None = (),
             level: int = 0) -> Any:
        """What `import` finds: another Triton, and the kernels' modules that run on it."""
        if name.split(".")[0] == "triton":
            found = self.triton
            for part in name.split(".")[1:] if names else ():
                found = getattr(found, part)
            return found
        if name in ("jttt.kernels", "jttt.kernels.hopper"):
            folder = name.removeprefix("jttt.kernels").replace(".", "") + "/" * name.endswith("hopper")
            return types.SimpleNamespace(**{each: types.SimpleNamespace(**self.load(folder + each)) for each in names})
        if name.startswith("jttt.kernels."):
            return types.SimpleNamespace(**self.load(name.removeprefix("jttt.kernels.").replace(".", "/")))
        return builtins.__import__(name, globals, locals, names or (), level)

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Shared | Barriers:
        if dtype is np.int64:
            made = Barriers(shape)
            self.barriers += made.barriers
            return made
        return Shared(np.full(shape, np.nan, dtype))

    def initialise(self, barrier: Barrier, count: int) -> None:
        assert count in (1, self.threads) and not barrier.count
        barrier.count = count

    def bring(self, descriptor: Descriptor, place: list[Any], barrier: Barrier, result: Shared, pred: Any) -> None:
        if pred:
            assert barrier.count == 1 and barrier.expected, "a tile was asked for at a barrier that is not armed"
            result.array[...] = np.nan
            barrier.on_its_way.append((result, lambda: descriptor.block(place, result.array.shape)))

    def copy(self, result: Shared, pointer: Pointer, mask: Any) -> None:
        result.array[...] = np.nan
        self.copies.append((result, lambda: _load(pointer, mask, 0)))

    def arrive(self, barrier: Barrier, increment_count: bool) -> None:
        assert barrier.count == self.threads and not increment_count
        barrier.expect(sum(result.array.nbytes for result, _ in self.copies))
        barrier.on_its_way, self.copies = self.copies, []

    def queue(self, left: Any, right: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.queued.append(Product(left, right, acc, use_acc))
        return self.queued[-1]

    def wait(self, later: int, deps: list[Any]) -> Any:
        while len(self.queued) > later:
            self.queued.pop(0).make()
        values = [x.value if isinstance(x, Product) else x for x in deps]
        assert all(x is not None for x in values), "a product was waited for that may still run"
        return values[0] if len(values) == 1 else tuple(values)

    def check_that_nothing_is_left(self) -> None:
        assert not self.queued and not self.copies, "a program ended before a product or a copy"
        assert not any(barrier.on_its_way or barrier.expected for barrier in self.barriers), (
            "a program ended before a tile that it had asked for")
        self.barriers.clear()


def _where(condition: Tile, x: Any, y: Any) -> Tile:
    chosen = tile(np.where(condition, x, y))
    return chosen.to(np.float32) if chosen.dtype == np.float64 else chosen  # Numbers of Python's have 32 bits.


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tile:
    if mask is None:
        return tile(pointer.array[pointer.offset])
    offset, mask = np.broadcast_arrays(pointer.offset, mask)
    loaded = pointer.array[np.where(mask, offset, 0)]
    return tile(np.where(mask, loaded, np.asarray(other, loaded.dtype)))


def _store(pointer: Pointer, values: Tile, mask: Any) -> None:
    offset, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
    assert values.dtype == pointer.array.dtype
    pointer.array[offset[mask]] = values[mask]


def _sum(x: Tile, axis: int, keep_dims: bool = False) -> Tile:
    return tile(np.sum(x, axis, keepdims=keep_dims))
