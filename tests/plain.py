"""An independent implementation to compare with: einsum, softmax and JAX's own autodiff."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def attention(query, key, value, *, is_causal: bool = False, scale: float | None = None,
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
    return ({"output": output} | {f"d_{name}": x for name, x in zip(names, first)}
            | {f"g_{name}": x for name, x in zip(names, second)})


def error(result: jax.Array, exact: jax.Array) -> float:
    """‖result − exact‖ / ‖exact‖; a NaN anywhere makes it NaN."""
    exact = np.asarray(exact, np.float64)
    return float(np.linalg.norm(np.asarray(result, np.float64) - exact) / max(np.linalg.norm(exact), 1e-30))
