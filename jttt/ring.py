"""Attention over a sequence that is spread over devices, for use inside `jax.shard_map`."""

from __future__ import annotations

import math
import numbers
from typing import Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jttt import arguments, derivatives, parts, passes
from jttt.spec import AttentionSpec, Band, Implementation, Ring, SequenceLayout, default_precision


@overload
def ring_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, axis_name: str, layout: SequenceLayout = "contiguous",
    scale: ArrayLike | None = None, is_causal: bool = False, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, axis_name: str, layout: SequenceLayout = "contiguous",
    scale: ArrayLike | None = None, is_causal: bool = False, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def ring_attention(
    query, key, value, *, axis_name, layout="contiguous", scale=None, is_causal=False, key_value_seq_lengths=None,
    local_window_size=None, query_segment_ids=None, key_value_segment_ids=None, logits_soft_cap=None,
    implementation=None, return_residual=False,
):
    """`dot_product_attention` of a sequence of which each device holds a part, called inside `jax.shard_map`.

    Keys and values go round the devices of a mesh axis while each of them keeps its queries; no device
    ever has the keys of more than two. So at orders zero, one and two a device needs the memory of its
    own part, however many devices there are, and the results are those of the whole sequence. Where a device
    has more than 32 MiB of keys, some heads go round after the others, unless other axes of the mesh are left
    to the compiler.

        def local(query, key, value):                                    # [B, T / devices, N, H]
            return jttt.ring_attention(query, key, value, axis_name="seq", is_causal=True, layout="zigzag")

        spec = jax.P(None, "seq")
        output = jax.shard_map(local, in_specs=spec, out_specs=spec, mesh=mesh)(*(
            jttt.to_zigzag(x, devices=mesh.shape["seq"]) for x in (query, key, value)))
        output = jttt.from_zigzag(output, devices=mesh.shape["seq"])

    Under a causal mask the first slices of a sequence have less to do than the last. The zigzag layout
    gives each device one of either end, and all of them the same work; everything that is computed for
    each token alone can stay in that layout, so that only a model's ends need `to_zigzag` and
    `from_zigzag`. Whatever depends on positions needs them in the same layout.

    Axes, with T and S the lengths of one device's part: B batch, T queries, S keys, N query heads,
    K key heads, H width, E width of value. Other mesh axes may divide batch and heads.

    Args:
      query, key, value: as in `dot_product_attention`, this device's part: `[B, T, N, H]`, `[B, S, K, H]`,
        `[B, S, K, E]`, or without B.
      axis_name: the axis of the surrounding `jax.shard_map` that divides the sequence.
      layout: "contiguous" if device i has the i-th slice of the sequence, "zigzag" if it has slices i
        and 2n − 1 − i of 2n (`to_zigzag`); T and S must then be even.
      scale, logits_soft_cap, implementation, return_residual: as in `dot_product_attention`.
      is_causal, local_window_size: as in `dot_product_attention`, of positions in the whole sequence;
        T and S must be equal.
      key_value_seq_lengths: int32 `[B]`, of the whole sequences; the same on every device.
      query_segment_ids, key_value_segment_ids: int32 `[B, T]` and `[B, S]`, this device's part.

    Returns:
      This device's part of the output, `[B, T, N, E]` in query's dtype, and with return_residual of the
      log-sum-exp, `[B, T, N]`.

    Differentiable: query, key, value and scale: a gradient, a gradient of a gradient, jax.jvp, and
    jax.jvp of a gradient. Anything else raises NotImplementedError.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; an axis_name that no surrounding `jax.shard_map`
        has; lengths or a layout that do not fit.

    Method: Ring Attention (arXiv 2310.01889), with the balanced order of Striped Attention's successors
    (zigzag); `jttt/parts.py` says how the passes of orders one and two become sums over parts.
    """
    query, key, value = arguments.checked_inputs(query, key, value)
    arguments.check_implementation(implementation, query.dtype)
    has_batch = query.ndim == 4
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    (B, T, _, H), S = query.shape, key.shape[1]
    ring = _ring(axis_name, layout, T, S)

    if scale is None:
        scale = 1 / math.sqrt(H)
    elif not isinstance(scale, numbers.Real):
        query, scale = arguments.scaled(query, scale), 1.0
    band = Band(right=0) if is_causal else Band()
    if local_window_size is not None:
        band &= Band(*arguments.checked_window(local_window_size))
    if band != Band() and T != S:
        raise ValueError(f"query has length {T} on each device and key {S}: expected the same where is_causal or "
                         "local_window_size relate their positions")
    key_lengths = arguments.integers("key_value_seq_lengths", key_value_seq_lengths, (B,), has_batch)
    query_segments, key_segments = arguments.checked_segments(
        query_segment_ids, key_value_segment_ids, B, T, S, has_batch)
    start, end = _key_range(band, ring, key_lengths, T, S)

    spec = AttentionSpec(
        scale=float(scale), soft_cap=arguments.checked_soft_cap(logits_soft_cap), ring=ring,
        precision=default_precision(),
        implementation=implementation)
    made = derivatives.attention(spec, passes.varying_alike(dict(
        query=query, key=key, value=value, bias=None, sinks=None, key_start=start, key_end=end,
        query_segments=query_segments, key_segments=key_segments, mask=None, mask_summary=None), {axis_name}))
    output, lse = made["output"], jnp.swapaxes(made["lse"], -1, -2)
    if not has_batch:
        output, lse = output[0], lse[0]
    return (output, lse) if return_residual else output


def _ring(axis_name: str, layout: SequenceLayout, T: int, S: int) -> Ring:
    if layout not in get_args(SequenceLayout):
        raise ValueError(f"layout was {layout!r}: expected 'contiguous' or 'zigzag'")
    if layout == "zigzag":
        for name, length in (("query", T), ("key", S)):
            if length % 2:
                raise ValueError(f"{name} has length {length} on each device and layout was 'zigzag': expected an even "
                                 "length, since a device has two slices of the sequence")
    # The axis of a `jax.vmap` has a size too, but no devices.
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(f"axis_name was {axis_name!r}: expected the name of an axis of a surrounding jax.shard_map")
    return Ring(axis_name, jax.lax.axis_size(axis_name), layout)


def _key_range(band: Band, ring: Ring, key_lengths: jax.Array | None, T: int, S: int
               ) -> tuple[jax.Array | None, jax.Array | None]:
    """The positions `[B or 1, T]` of keys, in the whole sequence, that each of this device's queries is limited to."""
    if band == Band() and key_lengths is None:
        return None, None
    position = parts.positions(ring, jax.lax.axis_index(ring.axis_name), T)[None]
    start = jnp.zeros_like(position) if band.left is None else position - min(band.left, S * ring.devices)
    end = jnp.full_like(position, S * ring.devices)
    if band.right is not None:
        end = jnp.minimum(end, position + min(band.right, S * ring.devices) + 1)
    if key_lengths is not None:
        end = jnp.minimum(end, key_lengths[:, None])
    return jnp.broadcast_to(start, end.shape), end


def to_zigzag(x: ArrayLike, *, devices: int, axis: int = 1) -> jax.Array:
    """A sequence in the order in which its equal slices over `devices` are those of `layout="zigzag"`.

    Device i has slices i and 2n − 1 − i of 2n. To be called outside `jax.shard_map`, on whole sequences; the length
    of `axis` must be a multiple of 2 · devices.
    """
    return _slices_in_order(x, _zigzag(devices), axis)


def from_zigzag(x: ArrayLike, *, devices: int, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`."""
    return _slices_in_order(x, np.argsort(_zigzag(devices)), axis)


def _zigzag(devices: int) -> np.ndarray:
    if devices < 1:
        raise ValueError(f"devices was {devices}: expected at least 1")
    return np.stack([np.arange(devices), 2 * devices - 1 - np.arange(devices)], axis=1).reshape(-1)


def _slices_in_order(x: ArrayLike, order: np.ndarray, axis: int) -> jax.Array:
    x = jnp.asarray(x)
    if x.shape[axis] % len(order):
        raise ValueError(f"x has length {x.shape[axis]} along axis {axis}: expected a multiple of 2 · devices = "
                         f"{len(order)}")
    moved = jnp.moveaxis(x, axis, 0)
    slices = moved.reshape(len(order), -1, *moved.shape[1:])[order]
    return jnp.moveaxis(slices.reshape(moved.shape), 0, axis)
