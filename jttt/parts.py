"""The passes of attention over keys that other devices hold.

Each device has its own queries and, at first, its own keys. The keys go round: in every step a device runs the pass on
the keys that it has, while the next ones arrive. Every pass is a sum over keys once the log-sum-exp, delta and row
columns are those of whole rows, so results of queries are added up where they are, and results of keys travel with
their keys and gather a part on every device. Only `forward`, which makes the log-sum-exp, weighs its parts instead.

Where a device has many keys, some of the heads go round after the others. A pass needs as much memory as one on some
heads of a device's own keys, whatever the number of devices. Method: Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jttt.spec import PER_POSITION, AttentionSpec, Ring, kind

Arrays = dict[str, jax.Array]

# What belongs to a key.
_OF_KEYS = ("key", "value", "key_segments")

# Results that are not of the inputs' dtype.
_COLUMNS = ("lse", "t_lse", "row_term")

# Keys of this many bytes or more take long enough, in kernels and between devices, to be worth a round of their own.
_ROUND = 2**25


def run(run_pass: Callable[..., Arrays], name: str, spec: AttentionSpec, operands: Arrays, wanted: Sequence[str]
        ) -> Arrays:
    """Runs pass `name` over the keys of all devices of `spec.ring`; otherwise as `passes.run`, which is `run_pass`."""
    key, rounds = operands["key"], _rounds(operands["key"])
    of_round = functools.partial(_one_round, run_pass, name, spec, wanted=wanted)
    if rounds == 1:
        return of_round(operands)

    # Heads lie along the last axis but one of whatever has them.
    def some(i: jax.Array) -> Arrays:
        return of_round({array: x if array in PER_POSITION else jax.lax.dynamic_slice_in_dim(
            x, i * (x.shape[-2] // rounds), x.shape[-2] // rounds, axis=-2) for array, x in operands.items()})

    def put(i: jax.Array, results: Arrays) -> Arrays:
        return {array: jax.lax.dynamic_update_slice_in_dim(results[array], x, i * x.shape[-2], axis=-2)
                for array, x in some(i).items()}

    def empty(x: jax.ShapeDtypeStruct) -> jax.Array:
        axes = tuple(jax.typeof(key).manual_axis_type.varying)
        zeros = jnp.zeros((*x.shape[:-2], x.shape[-2] * rounds, x.shape[-1]), x.dtype)
        return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros

    return jax.lax.fori_loop(0, rounds, put, jax.tree.map(empty, jax.eval_shape(some, 0)))


def _rounds(key: jax.Array) -> int:
    """How many rounds keys go, a divisor of their heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) > set(mesh.manual_axes):
        return 1  # Heads may lie on different devices, and which do is not to be seen here.
    heads, most = key.shape[-2], max(1, key.nbytes // _ROUND)
    return max(count for count in range(1, heads + 1) if heads % count == 0 and count <= most)


def _one_round(run_pass: Callable[..., Arrays], name: str, spec: AttentionSpec, operands: Arrays,
               wanted: Sequence[str]) -> Arrays:
    ring = spec.ring
    part_spec = dataclasses.replace(spec, ring=None, partial=True)
    keys = {array: x for array, x in operands.items() if kind(array) in _OF_KEYS}
    rows = {array: x for array, x in operands.items() if array not in keys}
    device = jax.lax.axis_index(ring.axis_name)
    combine = _weighed if name == "forward" else _added

    def part(keys: Arrays, hops: jax.Array | int) -> tuple[Arrays, Arrays]:
        """Results for queries and for keys, of keys that have come from `hops` devices before this one."""
        of_part = dict(rows)
        if "key_start" in rows:
            length, owner = keys["key"].shape[-3], (device - hops) % ring.devices
            of_part |= {array: _keys_before(rows[array], ring, owner, length) for array in ("key_start", "key_end")}
        results = run_pass(name, part_spec, of_part | keys, wanted)
        return ({array: x for array, x in results.items() if kind(array) not in _OF_KEYS},
                {array: x for array, x in results.items() if kind(array) in _OF_KEYS})

    def step(carry: tuple[Arrays, Arrays, Arrays], hops: jax.Array):
        keys, of_queries, of_keys = carry
        # Neither transfer waits for the pass, nor the pass for them.
        following, arrived = _passed_on(keys, ring), _passed_on(of_keys, ring)
        more_of_queries, more_of_keys = part(keys, hops)
        return (following, combine(of_queries, more_of_queries), _added(arrived, more_of_keys)), None

    carry = (_passed_on(keys, ring), *part(keys, 0))
    (_, of_queries, of_keys), _ = jax.lax.scan(step, carry, jnp.arange(1, ring.devices))
    results = of_queries | _passed_on(of_keys, ring)
    return {array: x if array in _COLUMNS else x.astype(operands["query"].dtype) for array, x in results.items()}


def put_together(results: Arrays) -> Arrays:
    """A pass's results from those for parts of the keys (or of the queries, for what belongs to keys), which lie
    along a new first axis; with one lse they are those of `forward`."""
    if "lse" not in results:
        return {array: jnp.sum(x, axis=0) for array, x in results.items()}
    lse = jax.nn.logsumexp(results["lse"], axis=0)
    weights = jnp.exp(results["lse"] - jnp.where(lse == -jnp.inf, 0, lse))
    output = jnp.sum(results["output"] * jnp.swapaxes(weights, -1, -2)[..., None], axis=0)
    return dict(output=output, lse=lse)


def positions(ring: Ring, device: jax.Array, length: int) -> jax.Array:
    """int32 `[length]`: where in the sequence each entry of a device's part stands."""
    starts = _starts(ring, device, length)
    return (starts[:, None] + jnp.arange(length // len(starts), dtype=jnp.int32)).reshape(-1)


def _starts(ring: Ring, device: jax.Array, length: int) -> jax.Array:
    """Where each slice of a device's part begins, in increasing order."""
    if ring.layout == "contiguous":
        return jnp.stack([device]) * length
    return jnp.stack([device, 2 * ring.devices - 1 - device]) * (length // 2)


def _keys_before(position: jax.Array, ring: Ring, device: jax.Array, length: int) -> jax.Array:
    """How many of a device's keys stand before each position; these come first in its part."""
    starts = _starts(ring, device, length)
    size = length // len(starts)
    return sum(jnp.clip(position - start, 0, size) for start in starts)


def _passed_on(arrays: Arrays, ring: Ring) -> Arrays:
    """What the device before this one has."""
    return jax.lax.ppermute(arrays, ring.axis_name, [(i, (i + 1) % ring.devices) for i in range(ring.devices)])


def _added(total: Arrays, part: Arrays) -> Arrays:
    return {array: total[array] + x for array, x in part.items()}


def _weighed(total: Arrays, part: Arrays) -> Arrays:
    """output and lse of the keys of both."""
    lse = jnp.logaddexp(total["lse"], part["lse"])
    # A row that has seen nothing yet has −∞ on both sides.
    shift = jnp.where(lse == -jnp.inf, 0, lse)
    weighed = [made["output"] * jnp.swapaxes(jnp.exp(made["lse"] - shift), -1, -2)[..., None] for made in (total, part)]
    return dict(output=sum(weighed), lse=lse)
