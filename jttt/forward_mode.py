"""The public function of forward mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jttt.attention import dot_product_attention

_POSITIONAL = ("query", "key", "value", "bias")
_DIFFERENTIABLE = (*_POSITIONAL, "sinks", "scale")

Arguments = Sequence[ArrayLike | None] | Mapping[str, ArrayLike | None]


def dot_product_attention_jvp(primals: Arguments, tangents: Arguments, **options: Any) -> tuple[Any, Any]:
    """`dot_product_attention` and its tangent along a direction, in one call.

    What `jax.jvp` returns, save that a tangent may be None: it is then zero, and the products in which
    it would stand are not made. The tangent takes one sweep over the keys, in memory linear in T and S.

        output, t_output = dot_product_attention_jvp(
            (query, key, value), (t_query, None, None), is_causal=True)
        output, t_output = dot_product_attention_jvp(
            dict(query=query, key=key, value=value, sinks=sinks), dict(sinks=t_sinks))

    Args:
      primals: (query, key, value) or (query, key, value, bias), or a mapping of these and of sinks and
        scale by name; shapes and dtypes as in `dot_product_attention`.
      tangents: the direction: a sequence like primals, or a mapping of some of their names. Each is
        None or has the shape and dtype of its primal.
      **options: any other argument of `dot_product_attention`.

    Returns:
      (output, t_output); with return_residual=True ((output, lse), (t_output, t_lse)). A query that
      sees no key has tangents 0.

    Differentiable: in reverse mode for primals and tangents by kernels; again for more by plain formulas
    that store T×S, as is the tangent of a tangent.

    Raises:
      ValueError, TypeError: a tangent without a primal or unlike it, and whatever `dot_product_attention` raises.

    Method: the first pass of order two in `jttt/DESIGN.md`.
    """
    named = {name: x if x is None else jnp.asarray(x) for name, x in _named("primals", primals).items()}
    direction = {name: jnp.asarray(t) for name, t in _named("tangents", tangents).items() if t is not None}
    for name, t in direction.items():
        x = named.get(name)
        if x is None:
            raise ValueError(f"tangents has {name} and primals has not: expected None, or {name} in both")
        if (t.shape, t.dtype) != (x.shape, x.dtype):
            raise ValueError(f"the tangent of {name} has shape {list(t.shape)} and dtype {t.dtype.name}: "
                             f"expected those of {name}, {list(x.shape)} and {x.dtype.name}")
    moving = {name: named.pop(name) for name in direction}
    return jax.jvp(lambda moving: dot_product_attention(**named, **moving, **options), (moving,), (direction,))


def _named(what: str, arguments: Arguments) -> dict[str, ArrayLike | None]:
    if isinstance(arguments, Mapping):
        named = dict(arguments)
    elif 3 <= len(arguments) <= len(_POSITIONAL):
        named = dict(zip(_POSITIONAL, arguments, strict=False))
    else:
        raise ValueError(f"{what} has length {len(arguments)}: expected (query, key, value), (query, key, value, "
                         "bias), or a mapping of names")
    if unknown := named.keys() - set(_DIFFERENTIABLE):
        raise ValueError(f"{what} has {', '.join(sorted(map(str, unknown)))}: expected names among "
                         f"{', '.join(_DIFFERENTIABLE)}; anything else is an option")
    return named
