"""How far attention and its derivatives are from the same computation in float64.

The losses here are not those that are timed. The gradient of a mean is uniform, and so small
that half precision loses it; errors would be those of underflow. Fixed random weights of unit
size keep every intermediate at a natural scale, and differ from row to row.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.harness import Record
from benchmarks.workload import Attention, Case, attention_of, draw

# Plain float64 attention on the host, to second order, has dozens of T×T arrays.
LONGEST = 1024

_OUTPUTS = {
    "forward": ("output",),
    "gradient": ("query", "key", "value"),
    "meta-gradient": ("query", "key", "value"),
}


def reduced(case: Case) -> Case:
    """The problem on which the errors of `case` are taken: one sequence, at most `LONGEST`."""
    return replace(case, b=1, t=min(case.t, LONGEST))


def errors(case: Case, implementations: list[str], seed: int) -> Iterator[Record]:
    """A record for each implementation, pass and output tensor: its relative error.

    Beside it stands the ratio to the error of `xla` in the same dtype, or None where that is not
    among the implementations: half precision has errors of its own, and this says what ours adds.
    """
    arrays = draw(case, jax.random.key(seed), "qkvqqkv")
    exact = _exact_derivatives(case, arrays)
    measured = {
        name: _relative_errors(jax.jit(derivatives(attention_of(name, case)))(*arrays), exact)
        for name in implementations
    }
    for name, by_pass in measured.items():
        for pass_name, outputs in _OUTPUTS.items():
            for index, output in enumerate(outputs):
                error = by_pass[pass_name][index]
                baseline = measured["xla"][pass_name][index] if "xla" in measured else None
                yield {
                    "implementation": name,
                    "pass": pass_name,
                    "output": output,
                    **case.describe(),
                    "error": error,
                    "ratio_to_xla": error / baseline if baseline else None,
                }


def derivatives(attention: Attention) -> Callable[..., dict[str, tuple[Array, ...]]]:
    """A function that gives the outputs of every pass, for losses fit for measuring errors.

    It takes query, key, value, weights of the output, and weights of the three gradients.
    """

    def compute(
        query: Array, key: Array, value: Array, weights: Array, *directions: Array
    ) -> dict[str, tuple[Array, ...]]:
        wide = jnp.promote_types(query.dtype, jnp.float32)

        def loss(*inputs: Array) -> Array:
            # Curved, since a linear loss would leave the gradient's own dependence on the
            # output, and with it the last backward of the chain, out of the meta-gradient.
            output = jnp.sin(attention(*inputs).astype(wide))
            return jnp.sum(weights.astype(wide) * output)

        gradient = jax.grad(loss, argnums=(0, 1, 2))

        def outer_loss(*inputs: Array) -> Array:
            pairs = zip(gradient(*inputs), directions, strict=True)
            return sum(jnp.sum(g.astype(wide) * d.astype(wide)) for g, d in pairs)

        inputs = query, key, value
        return {
            "forward": (attention(*inputs),),
            "gradient": gradient(*inputs),
            "meta-gradient": jax.grad(outer_loss, argnums=(0, 1, 2))(*inputs),
        }

    return compute


def plain_attention(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    """The textbook's attention in the inputs' dtype.

    `jax.nn.dot_product_attention` cannot be the reference: its softmax is float32 always.
    """
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
    if causal:
        visible = jnp.tri(query.shape[1], key.shape[1], dtype=bool)
        scores = jnp.where(visible, scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def relative_error(value: np.ndarray, exact: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the exact value; absolute where that is 0."""
    difference = np.linalg.norm(value.astype(np.float64) - exact)
    return float(difference / (np.linalg.norm(exact) or 1.0))


def _exact_derivatives(
    case: Case, arrays: tuple[Array, ...]
) -> Mapping[str, tuple[np.ndarray, ...]]:
    """`derivatives` in float64, on the host's CPU, of the very values of `arrays`."""
    attention = functools.partial(plain_attention, causal=case.causal)
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        doubles = [np.asarray(array).astype(np.float64) for array in arrays]
        return jax.device_get(jax.jit(derivatives(attention))(*doubles))


def _relative_errors(
    measured: Mapping[str, tuple[Array, ...]], exact: Mapping[str, tuple[np.ndarray, ...]]
) -> dict[str, list[float]]:
    return {
        pass_name: [
            relative_error(np.asarray(value), exact_value)
            for value, exact_value in zip(values, exact[pass_name], strict=True)
        ]
        for pass_name, values in measured.items()
    }
