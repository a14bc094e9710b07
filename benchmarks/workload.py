"""What is measured: attention problems, the passes over them, and the work each must do."""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

import jttt.modes
from benchmarks import harness

Attention = Callable[[Array, Array, Array], Array]
Inputs = tuple[Array, Array, Array]

# Several times the largest L2 cache of a current GPU (50 MiB on an H200, 126 MiB on a B200).
_ROTATION_BYTES = 2**28
_CACHE_BYTES = 50 * 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """One self-attention problem, with the axis letters of `jax.nn.dot_product_attention`.

    Attributes:
      b: batch size.
      t: tokens, as queries and as keys.
      n: heads.
      k: key heads.
      h: width of a head.
      dtype: name of the dtype of query, key and value.
      causal: whether a query sees only the keys up to its own position.
    """

    b: int
    t: int
    n: int
    k: int
    h: int
    dtype: str
    causal: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of query and output."""
        return self.b, self.t, self.n, self.h

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of key and value."""
        return self.b, self.t, self.k, self.h

    def describe(self) -> dict[str, object]:
        """The problem as it appears in a results file."""
        sizes = dataclasses.asdict(self)
        dtype, causal = sizes.pop("dtype"), sizes.pop("causal")
        return {"shape": sizes, "dtype": dtype, "causal": causal}


def cases(flags: argparse.Namespace, causal: bool) -> list[Case]:
    """The problems that the flags of `harness.add_problem_flags` ask for, one for each length."""
    return [Case(b=flags.b, t=t, n=flags.h, k=flags.k or flags.h, h=flags.d,
                 dtype=harness.DTYPES[flags.dtype], causal=causal) for t in flags.t]


def draw(case: Case, key: Array, letters: str = "qkv") -> tuple[Array, ...]:
    """An array of standard normal values for each letter: of query's shape for q, else of key's."""
    return normal(key, tuple(case.shape if letter == "q" else case.key_shape for letter in letters), case.dtype)


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def normal(key: Array, shapes: tuple[tuple[int, ...], ...], dtype: str) -> tuple[Array, ...]:
    """An array of standard normal values for each shape."""
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    numbers = jnp.split(jax.random.normal(key, ends[-1:]).astype(dtype), ends[:-1])
    return tuple(x.reshape(shape) for x, shape in zip(numbers, shapes, strict=True))


def rotating_inputs(case: Case, seed: int) -> list[Inputs]:
    """Enough sets of random inputs that a launch does not find its own still in cache."""
    return [draw(case, key) for key in jax.random.split(jax.random.key(seed), rotation(case))]


def rotation(case: Case) -> int:
    """How many sets of inputs that takes."""
    numbers = math.prod(case.shape) + 2 * math.prod(case.key_shape)
    return sets_beyond_cache(numbers * jnp.dtype(case.dtype).itemsize)


def sets_beyond_cache(set_bytes: int) -> int:
    """How many sets of inputs of a size are more than a cache holds, two at least.

    At most 64; but two where even these would fit in an H200's cache: such launches' time is latency, not memory,
    and XLA records the launches of a program as a CUDA graph anew for addresses that it has not met lately.
    """
    if 64 * set_bytes <= _CACHE_BYTES:
        return 2
    return min(max(2, math.ceil(_ROTATION_BYTES / set_bytes)), 64)


def _triton(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    return jttt.dot_product_attention(query, key, value, is_causal=causal, implementation="triton")


def _xla(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    """What a user would run instead of this library, hence not `jttt`'s own plain formulas."""
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation="xla"
    )


def _plain(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    return jttt.dot_product_attention(query, key, value, is_causal=causal, implementation="xla")


def _cudnn(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation="cudnn"
    )


def _mode(bwd_mode: str) -> Callable[..., Array]:
    def attend(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
        return jttt.modes.dot_product_attention(
            query, key, value, is_causal=causal, bwd_mode=bwd_mode, implementation="triton"
        )

    return attend


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "triton": _triton, "xla": _xla, "plain": _plain, "cudnn": _cudnn,
} | {bwd_mode: _mode(bwd_mode) for bwd_mode in jttt.modes.BWD_MODES if bwd_mode != "flash"}


def implementation_of(bwd_mode: str) -> str:
    """The name in `IMPLEMENTATIONS` of a mode of the backward; "flash" is jttt itself."""
    return "triton" if bwd_mode == "flash" else bwd_mode


def runnable(names: Sequence[str], dtype: str, device: jax.Device) -> list[str]:
    """Those of the implementations that `device` can run; says which it skips or replaces, and why."""
    chosen = []
    for name in names:
        if name == "xla" and dtype == "float16" and device.platform == "cpu":
            print("xla: jax.nn.dot_product_attention has no float16 on a CPU; the plain formulas of jttt run in its "
                  "place, as plain")
            name = "plain"
        if name not in ("xla", "plain") and device.platform != "gpu":
            print(f"{name}: skipped, it needs an NVIDIA GPU and this is {device}")
        else:
            chosen.append(name)
    return chosen


def attention_of(implementation: str, case: Case) -> Attention:
    """The attention function that `implementation` names, for the mask of `case`."""
    return functools.partial(IMPLEMENTATIONS[implementation], causal=case.causal)


def forward(attention: Attention) -> Attention:
    """Attention itself."""
    return attention


def gradient(attention: Attention) -> Callable[..., Inputs]:
    """The gradient of mean(attention) with respect to query, key and value."""

    def loss(query: Array, key: Array, value: Array) -> Array:
        return _mean(attention(query, key, value), power=1)

    return jax.grad(loss, argnums=(0, 1, 2))


def meta_gradient(attention: Attention) -> Callable[..., Inputs]:
    """The gradient of Σ mean(g²), over the three gradients g of `gradient`."""
    inner = gradient(attention)

    def loss(query: Array, key: Array, value: Array) -> Array:
        return sum(_mean(each, power=2) for each in inner(query, key, value))

    return jax.grad(loss, argnums=(0, 1, 2))


def _mean(values: Array, power: int) -> Array:
    """The mean of `values` to a power, in float32; a sum where they are float16.

    One over the number of values is below what float16 holds, so the gradients of a mean would
    be zeros, and this a benchmark of zeros. The constant factor changes no operation.
    """
    total = jnp.sum(values.astype(jnp.float32) ** power)
    return total if values.dtype == jnp.float16 else total / values.size


PASSES: dict[str, Callable[[Attention], Callable]] = {
    "forward": forward,
    "gradient": gradient,
    "meta-gradient": meta_gradient,
}

# Matrix products in each pass, of 2·T·T·H operations a head: a forward has 2, a backward 5, the
# gradient of a backward 15. The meta-gradient of a loss that bends with the output ends with one
# more backward; the mean's gradient does not depend on the output, so nothing is left for it.
_PRODUCTS = {"forward": 2, "gradient": 2 + 5, "order two": 15, "meta-gradient": 2 + 5 + 15}


def operations(pass_name: str, case: Case) -> int:
    """Floating-point operations that a pass needs, half of the square's under a causal mask.

    It counts the algorithm, not the implementation, so that TFLOP/s compare as times do: plain
    attention, which also computes what the mask hides, gets no credit for it.
    """
    square = _PRODUCTS[pass_name] * 2 * case.b * case.n * case.t**2 * case.h
    return square // 2 if case.causal else square
