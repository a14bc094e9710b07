"""Learning while reading: a step of an optimiser on each chunk of a sequence, differentiable as a whole.

Test-time training end to end (arXiv 2512.23675) reads a sequence in chunks. Each is predicted with
the weights learned from the chunks before it, then learned from. Training differentiates through
the steps, so a training step is a gradient of gradients; at test time the same loop just runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

type Tree = Any
type Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Tree, Tree]]]


class InnerState(NamedTuple):
    """What a reader carries from chunk to chunk: a pytree.

    Attributes:
      weights: the fast weights, those that learn.
      optimizer_state: of the optax transformation that moves them.
      carry: whatever else the loss hands on, such as key-value caches.
    """

    weights: Tree
    optimizer_state: optax.OptState
    carry: Tree

    @classmethod
    def start(cls, optimizer: optax.GradientTransformation, weights: Tree, carry: Tree = None) -> InnerState:
        """The state before the first chunk."""
        return cls(weights, optimizer.init(weights), carry)


def inner_step(loss: Loss, optimizer: optax.GradientTransformation, state: InnerState, chunk: Tree
               ) -> tuple[InnerState, Tree]:
    """Predicts one chunk with the weights as they are, then moves them down the gradient of its loss.

    Args:
      loss: `loss(weights, carry, chunk) -> (loss, (carry, output))`, the first a floating scalar.
        What else it depends on, such as frozen weights, it closes over.
      optimizer: any optax transformation; to train through it, one that JAX can differentiate.
      state: from `InnerState.start` or the step before.
      chunk: any pytree.

    Returns:
      The state after the chunk, its carry being what the loss made, and the loss's output.

    The gradient is that for the weights alone: the carry is not differentiated here, so attention
    to a cache in it costs no gradient of the cache.
    """
    gradient, (carry, output) = jax.grad(loss, has_aux=True)(state.weights, state.carry, chunk)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.weights)
    return InnerState(optax.apply_updates(state.weights, updates), optimizer_state, carry), output


def inner_loop(loss: Loss, optimizer: optax.GradientTransformation, state: InnerState, chunks: Tree, *,
               checkpoint_every: int | None = None) -> tuple[InnerState, Tree]:
    """One `inner_step` on each chunk, in order: a `jax.lax.scan` that can be differentiated.

    Written for one sequence; `jax.vmap` runs a batch of them, each with fast weights of its own.

    Args:
      loss, optimizer, state: as in `inner_step`.
      chunks: a pytree whose leaves have the chunks along their first axis.
      checkpoint_every: what a gradient through the loop keeps. None: everything that each chunk
        computed. r: the state before every r-th chunk, from which r chunks at a time are computed
        again; memory grows as states / r + r · (all that one chunk computes), so with the square
        root of the number of chunks if r does. r = 1 keeps every state and recomputes one chunk.

    Returns:
      The state after the last chunk, and the outputs of the loss, stacked along a first axis.

    Raises:
      ValueError: chunks of different numbers along the first axis, or of none; checkpoint_every below 1.
    """
    count = _number_of_chunks(chunks)
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every was {checkpoint_every}: expected at least 1, or None")

    def step(state: InnerState, chunk: Tree) -> tuple[InnerState, Tree]:
        return inner_step(loss, optimizer, state, chunk)

    def steps(state: InnerState, chunks: Tree) -> tuple[InnerState, Tree]:
        return jax.lax.scan(step, state, chunks)

    if checkpoint_every is None:
        return steps(state, chunks)
    if checkpoint_every == 1:
        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, chunks)

    groups, rest = divmod(count, checkpoint_every)
    whole = groups * checkpoint_every
    grouped = jax.tree.map(lambda x: x[:whole].reshape(groups, checkpoint_every, *x.shape[1:]), chunks)
    state, outputs = jax.lax.scan(jax.checkpoint(steps, prevent_cse=False), state, grouped)
    outputs = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), outputs)
    if rest:
        state, last = jax.checkpoint(steps)(state, jax.tree.map(lambda x: x[whole:], chunks))
        outputs = jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, last)
    return state, outputs


def _number_of_chunks(chunks: Tree) -> int:
    shapes = {jax.tree_util.keystr(path) or "itself": jnp.shape(x)
              for path, x in jax.tree_util.tree_leaves_with_path(chunks)}
    counts = {shape[0] if shape else None for shape in shapes.values()}
    if len(counts) != 1 or counts <= {None, 0}:
        raise ValueError("chunks has leaves of shapes "
                         f"{', '.join(f'{name}: {list(shape)}' for name, shape in shapes.items()) or 'none'}: expected "
                         "one number of chunks, at least 1, along the first axis of each")
    return counts.pop()
