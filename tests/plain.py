"""An independent implementation to compare with: einsum, softmax and JAX's own autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Problem(NamedTuple):
    """An attention problem, by the axis letters of `jttt.dot_product_attention`.

    Without B there is no batch axis; without E, values are as wide as keys.
    """

    T: int
    S: int
    N: int = 1
    K: int = 1
    H: int = 8
    E: int | None = None
    B: int | None = None
    is_causal: bool = False

    def draw(self, dtype: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Normal `(arrays, directions)` for `orders` of a function that returns `joined`."""
        generator = np.random.default_rng(0)
        batch = () if self.B is None else (self.B,)
        E = self.H if self.E is None else self.E

        def normal(*shape: int) -> np.ndarray:
            return generator.standard_normal((*batch, *shape))

        arrays = [normal(self.T, self.N, self.H), normal(self.S, self.K, self.H), normal(self.S, self.K, E)]
        directions = [normal(self.T, self.N, E + 1), *(normal(*x.shape[-3:]) for x in arrays)]
        wide = jnp.promote_types(dtype, np.float32)
        return [x.astype(jnp.dtype(dtype)) for x in arrays], [x.astype(wide) for x in directions]


def attention(query, key, value, *, is_causal: bool = False, scale: jax.typing.ArrayLike | None = None,
              visible: Any = None) -> tuple[jax.Array, jax.Array]:
    """`(output, lse)` for `[..., T, N, H]`, `[..., S, K, H]`, `[..., S, K, E]`, in the inputs' dtype.

    `visible` is boolean, broadcastable to `[..., N, T, S]`. Rows that see nothing are not handled.
    """
    group = query.shape[-2] // key.shape[-2]
    key, value = jnp.repeat(key, group, axis=-2), jnp.repeat(value, group, axis=-2)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...tnh,...snh->...nts", query, key) * scale
    seen = np.ones(scores.shape[-2:], bool) if visible is None else visible
    if is_causal:
        seen = seen & np.tri(*scores.shape[-2:], dtype=bool)
    scores = jnp.where(seen, scores, -jnp.inf)
    output = jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(scores, axis=-1), value)
    return output, jnp.swapaxes(jax.nn.logsumexp(scores, axis=-1), -1, -2)


def joined(output: jax.Array, lse: jax.Array) -> jax.Array:
    """The output with its log-sum-exp as one more column, so that `orders` differentiates both."""
    return jnp.concatenate([output.astype(lse.dtype), lse[..., None]], axis=-1)


def orders(function, arrays, directions) -> dict[str, jax.Array]:
    """Order 0, 1 and 2 of `function(query, key, value) -> output`, by name.

    The losses are curved, so that every cotangent reaches every rule: order one is the gradient of
    sum(w · sin(output)), order two that of a curved function of order one.
    """
    names = ("query", "key", "value")
    weights, *slopes = directions

    def loss(*arrays):
        output = function(*arrays)
        return jnp.sum(weights * jnp.sin(output.astype(weights.dtype))), output

    def meta(*arrays):
        gradients, output = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        curved = sum(jnp.sum(slope * jnp.sin(g.astype(slope.dtype)))
                     for slope, g in zip(slopes, gradients, strict=True))
        return curved, (output, gradients)

    second, (output, first) = jax.jit(jax.grad(meta, (0, 1, 2), has_aux=True))(*arrays)
    return ({"output": output} | {f"d_{name}": x for name, x in zip(names, first, strict=True)}
            | {f"g_{name}": x for name, x in zip(names, second, strict=True)})


def exact_orders(function: Callable, arrays: Sequence, directions: Sequence) -> dict[str, np.ndarray]:
    """`orders` in float64, of the very values of `arrays` and `directions`."""
    with jax.enable_x64(True):
        wide = [[jnp.asarray(np.asarray(x, np.float64)) for x in xs] for xs in (arrays, directions)]
        return {name: np.asarray(x) for name, x in orders(function, *wide).items()}


def error(result: jax.Array, exact: jax.Array) -> float:
    """‖result − exact‖ / ‖exact‖, absolute where ‖exact‖ is below 1; a NaN anywhere makes it NaN."""
    exact = np.asarray(exact, np.float64)
    return float(np.linalg.norm(np.asarray(result, np.float64) - exact) / max(np.linalg.norm(exact), 1.0))


def assert_close(results: dict[str, Any], exact: dict[str, Any], tolerance: float) -> None:
    """The error of every named array is at most `tolerance`; no NaN passes."""
    errors = {name: error(results[name], exact[name]) for name in exact}
    assert all(x <= tolerance for x in errors.values()), errors
