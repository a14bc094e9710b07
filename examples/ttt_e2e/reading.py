"""Reading one sequence at test time: learn from whole chunks, and decode inside of the chunk that is not whole yet.

The cost of a token does not grow with what was read before it: caches hold a window, the fast weights
the rest. A token is decoded with the fast weights learned from the chunks before its own; its keys
and values go into a buffer for one chunk. A chunk is learned from once the token after it is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jttt
from examples.ttt_e2e import model
from examples.ttt_e2e.model import Config, Weights


class Reader(NamedTuple):
    """What is left of all chunks that were read.

    Attributes:
      inner: fast weights, and the caches of the upper blocks.
      lower: caches of the lower blocks, along a first axis.
      start: int32 scalar, tokens read.
    """

    inner: jttt.InnerState
    lower: jttt.KeyValueCache
    start: jax.Array


class Buffer(NamedTuple):
    """Keys and values `(key, value)` of the chunk being decoded, for the lower and the upper blocks, and its length."""

    lower: tuple[jax.Array, jax.Array]
    upper: list[tuple[jax.Array, jax.Array]]
    length: jax.Array


def start_reader(weights: Weights, config: Config) -> Reader:
    """A reader that has read nothing.

    Raises:
      ValueError: the model attends to everything, so nothing bounds its caches.
    """
    if config.mode == "full":
        raise ValueError("mode was 'full': expected 'ttt' or 'window'; full attention has no window to cache")
    lower, upper = config.layers - config.fast_layers, config.fast_layers
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *model.empty_caches(config, lower))
    inner = jttt.InnerState.start(model.inner_optimizer(config), weights["fast"], model.empty_caches(config, upper))
    return Reader(inner, stacked, jnp.zeros((), jnp.int32))


def empty_buffer(config: Config) -> Buffer:
    """Room for one chunk."""
    head = config.width // config.heads

    def pair(*axes: int) -> tuple[jax.Array, jax.Array]:
        return tuple(jnp.zeros((*axes, config.chunk, config.heads, head), config.dtype) for _ in range(2))

    return Buffer(pair(config.layers - config.fast_layers), [pair() for _ in range(config.fast_layers)],
                  jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames="config")
def learn_chunk(weights: Weights, reader: Reader, tokens: jax.Array, config: Config) -> Reader:
    """Reads a chunk, int32 `[chunk + 1]` with the token that follows it, and in mode "ttt" learns from it."""
    x = model.embed(weights, tokens[:-1], config)
    positions = reader.start + jnp.arange(config.chunk)

    def attend(cache: jttt.KeyValueCache, *query_key_value: jax.Array) -> tuple[jax.Array, jttt.KeyValueCache]:
        return jttt.chunk_attention(*query_key_value, cache)

    x, lower = model.lower_blocks(weights, x, positions, attend, config.rope_base, reader.lower)
    loss, chunk = model.chunk_loss(weights, config), model.Chunk(x, tokens[1:], reader.start)
    if config.mode == "ttt":
        inner, _ = jttt.inner_step(loss, model.inner_optimizer(config), reader.inner, chunk)
    else:
        _, (caches, _) = loss(reader.inner.weights, reader.inner.carry, chunk)
        inner = reader.inner._replace(carry=caches)
    return Reader(inner, lower, reader.start + config.chunk)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="buffer")
def read_tokens(weights: Weights, reader: Reader, buffer: Buffer, tokens: jax.Array, count: jax.Array, config: Config
                ) -> tuple[Buffer, jax.Array]:
    """Reads the next tokens of a chunk that is not whole, and returns the logits `[vocabulary]` of what follows.

    tokens is int32 `[T]`, of which `count` count; the rest is padding, and must fit into the chunk too.
    """
    x = model.embed(weights, tokens, config)
    positions = reader.start + buffer.length + jnp.arange(len(tokens))

    def attend(held: tuple[jttt.KeyValueCache, tuple], query: jax.Array, *key_value: jax.Array) -> tuple[Any, Any]:
        cache, buffers = held
        buffers = tuple(jax.lax.dynamic_update_slice_in_dim(old, new, buffer.length, axis=0)
                        for old, new in zip(buffers, key_value, strict=True))
        return jttt.chunk_attention(query, *buffers, cache, query_offset=buffer.length)[0], buffers

    x, lower = model.lower_blocks(weights, x, positions, attend, config.rope_base, (reader.lower, buffer.lower))
    held = list(zip(reader.inner.carry, buffer.upper, strict=True))
    x, upper = model.upper_blocks(weights, reader.inner.weights, x, positions, attend, config.rope_base, held)
    last = jax.lax.dynamic_slice_in_dim(x, count - 1, 1)
    return Buffer(lower, upper, buffer.length + count), model.logits_of(weights, last)[0].astype(jnp.float32)


def read_prompt(weights: Weights, prompt: jax.Array, config: Config, progress: Callable[[int], Any] = lambda read: None
                ) -> tuple[Reader, Buffer, jax.Array]:
    """Learns from the whole chunks of a prompt int32 `[length]`, reads the rest, and returns the logits after it.

    `progress` is called with the number of tokens after each chunk.
    """
    reader, buffer = start_reader(weights, config), empty_buffer(config)
    # The last token's successor is not known, so a chunk that it ends stays in the buffer.
    whole = (len(prompt) - 1) // config.chunk
    for i in range(whole):
        begin = i * config.chunk
        reader = learn_chunk(weights, reader, prompt[begin:begin + config.chunk + 1], config)
        progress(config.chunk)
    rest = prompt[whole * config.chunk:]
    padded = jnp.zeros(config.chunk, jnp.int32).at[:len(rest)].set(rest)
    buffer, logits = read_tokens(weights, reader, buffer, padded, jnp.int32(len(rest)), config)
    progress(len(rest))
    return reader, buffer, logits
