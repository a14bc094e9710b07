"""A sliding-window transformer whose last blocks learn from each chunk they have read.

The blocks are pre-norm, with rotary positions, normalised queries and keys, and SwiGLU. The last
quarter of them have a second MLP, the fast one. In mode "ttt" it takes a gradient step on the
next-token loss of every chunk; in modes "window" and "full" it is one more MLP, so the three modes
have the same weights and differ only in how far a token sees and in what learns at test time.

Everything here is for one sequence; `jax.vmap` makes the batch. The lower blocks never learn while
reading, so they run over the whole sequence at once, outside of the loop over chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jttt

type Weights = dict[str, Any]
type Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
type Mode = Literal["ttt", "window", "full"]

MODES: tuple[Mode, ...] = ("ttt", "window", "full")

# Of a block, a gradient keeps what attention made and recomputes the rest.
_KEPT = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")


@dataclasses.dataclass(frozen=True)
class Config:
    """The model and how it reads.

    Attributes:
      mode: "ttt" learns from each chunk through a sliding window; "window" has the window alone;
        "full" sees everything before it.
      sequence: tokens a training sequence predicts, a multiple of chunk.
      chunk: tokens between two steps of the fast weights.
      window: tokens that attention reaches, the token itself among them. At least a chunk: what has
        left the window must have been learned.
      inner_lr: length of a step of the fast weights, at most: gradients are clipped to norm 1.
      dtype: of activations; weights are float32.
      checkpoint_every: chunks that are recomputed together in a gradient (`jttt.inner_loop`).
    """

    mode: Mode = "ttt"
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 1664
    vocabulary: int = 256
    sequence: int = 8192
    chunk: int = 1024
    window: int = 8192
    inner_lr: float = 1.0
    rope_base: float = 500_000.0
    dtype: str = "bfloat16"
    checkpoint_every: int = 1

    @property
    def fast_layers(self) -> int:
        """The last quarter of the blocks."""
        return max(1, self.layers // 4)

    def check(self) -> None:
        """Raises ValueError, naming the field, if the configuration makes no sense."""
        for field in ("layers", "width", "heads", "hidden", "vocabulary", "sequence", "chunk", "window",
                      "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} was {getattr(self, field)}: expected at least 1")
        if not 0 <= self.inner_lr < math.inf:
            raise ValueError(f"inner_lr was {self.inner_lr}: expected a finite number, at least 0")
        if self.mode not in MODES:
            raise ValueError(f"mode was {self.mode!r}: expected one of {', '.join(MODES)}")
        if self.layers < 2:
            raise ValueError("layers was 1: expected at least 2, one to learn while reading and one below it")
        if self.width % (2 * self.heads):
            raise ValueError(f"width was {self.width}: expected an even multiple of heads = {self.heads}")
        if self.sequence % self.chunk:
            raise ValueError(f"sequence was {self.sequence}: expected a multiple of chunk = {self.chunk}")
        if self.window < self.chunk:
            raise ValueError(f"window was {self.window}: expected at least chunk = {self.chunk}, or tokens would leave "
                             "the window before the fast weights have learned from them")


# The weights.


def init_weights(config: Config, seed: int) -> Weights:
    """Draws the weights; matrices keep the variance of what they multiply, and each block starts small."""
    random = np.random.default_rng(seed)
    head = config.width // config.heads
    small = 1 / (2 * config.layers)

    def normal(*shape: int, variance: float) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32) * np.float32(variance ** 0.5))

    def mlp() -> Weights:
        return {
            "gate": normal(config.width, config.hidden, variance=1 / config.width),
            "up": normal(config.width, config.hidden, variance=1 / config.width),
            "down": normal(config.hidden, config.width, variance=small / config.hidden),
        }

    def block() -> Weights:
        return {
            "attention_norm": jnp.ones(config.width),
            "query_key_value": normal(3, config.width, config.heads, head, variance=1 / config.width),
            "query_norm": jnp.ones(head),
            "key_norm": jnp.ones(head),
            "attention_out": normal(config.heads, head, config.width, variance=small / config.width),
            "mlp_norm": jnp.ones(config.width),
            "mlp": mlp(),
        }

    lower = [block() for _ in range(config.layers - config.fast_layers)]
    return {
        "embedding": normal(config.vocabulary, config.width, variance=1 / config.width),
        # One axis over the lower blocks, so that they compile once.
        "lower": jax.tree.map(lambda *x: jnp.stack(x), *lower),
        "upper": [{**block(), "fast_norm": jnp.ones(config.width)} for _ in range(config.fast_layers)],
        "fast": [mlp() for _ in range(config.fast_layers)],
        # Logits start small, that of the token just read among them.
        "final_norm": jnp.full(config.width, config.width ** -0.5),
    }


# The layers, for one sequence.


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scales each vector to a root mean square of one, then each entry by its gain."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * gain).astype(x.dtype)


def embed(weights: Weights, tokens: jax.Array, config: Config) -> jax.Array:
    """The first block's input `[time, width]`. Rows of the matrix have length one, as logits want it; here each
    entry is about one, or what blocks add would drown what was read."""
    return (weights["embedding"][tokens] * config.width ** 0.5).astype(config.dtype)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) for queries or keys `[time, heads, head]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * base ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1).astype(x.dtype)


def swiglu(weights: Weights, x: jax.Array) -> jax.Array:
    """The MLP of arXiv 2002.05202, without biases."""
    gate, up, down = (weights[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def block(weights: Weights, fast: Weights | None, x: jax.Array, positions: jax.Array, attend: Attend, base: float
          ) -> tuple[jax.Array, Any]:
    """One block on `[time, width]`, and what its attention hands on; `fast` is the MLP that may learn."""
    normed = rms_norm(x, weights["attention_norm"])
    query, key, value = jnp.einsum("td,cdnh->ctnh", normed, weights["query_key_value"].astype(x.dtype))
    query = rotate(rms_norm(query, weights["query_norm"]), positions, base)
    key = rotate(rms_norm(key, weights["key_norm"]), positions, base)
    mixed, kept = attend(query, key, value)
    x = x + jnp.einsum("tnh,nhd->td", mixed, weights["attention_out"].astype(x.dtype))
    if fast is not None:
        x = x + swiglu(fast, rms_norm(x, weights["fast_norm"]))
    return x + swiglu(weights["mlp"], rms_norm(x, weights["mlp_norm"])), kept


def lower_blocks(weights: Weights, x: jax.Array, positions: jax.Array, attend: Callable, base: float,
                 caches: Any = None) -> tuple[jax.Array, Any]:
    """The blocks that do not learn while reading; `attend(cache, query, key, value)`, caches along a first axis."""

    def one(x: jax.Array, layer: tuple[Weights, Any]) -> tuple[jax.Array, Any]:
        return block(layer[0], None, x, positions, functools.partial(attend, layer[1]), base)

    return jax.lax.scan(jax.checkpoint(one, policy=_KEPT, prevent_cse=False), x, (weights["lower"], caches))


def upper_blocks(weights: Weights, fast: list[Weights], x: jax.Array, positions: jax.Array, attend: Callable,
                 base: float, caches: list[Any]) -> tuple[jax.Array, list[Any]]:
    """The blocks whose second MLPs, `fast`, may learn while reading."""
    kept = []
    for layer, mlp, cache in zip(weights["upper"], fast, caches, strict=True):
        x, handed_on = block(layer, mlp, x, positions, functools.partial(attend, cache), base)
        kept.append(handed_on)
    return x, kept


def logits_of(weights: Weights, x: jax.Array) -> jax.Array:
    """Logits `[time, vocabulary]`, with the embedding's own matrix."""
    return rms_norm(x, weights["final_norm"]) @ weights["embedding"].astype(x.dtype).T


def token_losses(weights: Weights, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy in nats `[time]` of each target, from the last block's `[time, width]`."""
    logits = logits_of(weights, x)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.arange(logits.shape[-1]) == targets[:, None]  # A reduction where indexing would scatter gradients.
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)


# How a sequence is read.


class Chunk(NamedTuple):
    """A chunk as the upper blocks see it: what the lower ones made of it, what to predict, and where it begins."""

    x: jax.Array
    targets: jax.Array
    start: jax.Array


def inner_optimizer(config: Config) -> optax.GradientTransformation:
    """What moves the fast weights: gradient steps of bounded length."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(config.inner_lr))


def empty_caches(config: Config, layers: int) -> list[jttt.KeyValueCache]:
    """One cache for each of so many layers."""
    return [jttt.empty_cache(config.window, config.heads, config.width // config.heads, config.dtype)
            for _ in range(layers)]


def chunk_loss(weights: Weights, config: Config, attend_chunk: Callable = jttt.chunk_attention) -> Callable:
    """The inner loss, as `jttt.inner_loop` takes it: of the fast weights, the caches and a chunk."""

    def attend(cache: jttt.KeyValueCache, *query_key_value: jax.Array) -> tuple[jax.Array, jttt.KeyValueCache]:
        return attend_chunk(*query_key_value, cache)

    def loss(fast: list[Weights], caches: list[jttt.KeyValueCache], chunk: Chunk):
        positions = chunk.start + jnp.arange(chunk.x.shape[0])
        x, caches = upper_blocks(weights, fast, chunk.x, positions, attend, config.rope_base, caches)
        losses = token_losses(weights, x, chunk.targets)
        return jnp.mean(losses), (caches, losses)

    return loss


def sequence_losses(weights: Weights, tokens: jax.Array, config: Config,
                    attend_chunk: Callable = jttt.chunk_attention) -> jax.Array:
    """Cross-entropy in nats `[sequence]` of tokens 1 … of `[sequence + 1]`, each predicted from those before it.

    In mode "ttt" each chunk is predicted with fast weights that have learned from the chunks before
    it. `attend_chunk` is for comparisons: called as `jttt.chunk_attention` is.
    """
    read, targets = tokens[:-1], tokens[1:]
    positions = jnp.arange(config.sequence)
    window = None if config.mode == "full" else (config.window - 1, 0)

    def attend(cache: None, *query_key_value: jax.Array) -> tuple[jax.Array, None]:
        return jttt.dot_product_attention(*query_key_value, is_causal=True, local_window_size=window), None

    def in_chunks(x: jax.Array) -> jax.Array:
        return x.reshape(-1, config.chunk, *x.shape[1:])

    x = embed(weights, read, config)
    x, _ = lower_blocks(weights, x, positions, attend, config.rope_base)
    if config.mode == "ttt":
        optimizer = inner_optimizer(config)
        state = jttt.InnerState.start(optimizer, weights["fast"], empty_caches(config, config.fast_layers))
        chunks = Chunk(in_chunks(x), in_chunks(targets), positions[::config.chunk])
        _, losses = jttt.inner_loop(chunk_loss(weights, config, attend_chunk), optimizer, state, chunks,
                                    checkpoint_every=config.checkpoint_every)
    else:
        def upper(weights: Weights, x: jax.Array) -> jax.Array:
            caches = [None] * config.fast_layers
            return upper_blocks(weights, weights["fast"], x, positions, attend, config.rope_base, caches)[0]

        x = jax.checkpoint(upper, policy=_KEPT)(weights, x)
        # The logits of one chunk at a time.
        losses = jax.lax.map(jax.checkpoint(lambda chunk: token_losses(weights, *chunk)),
                             (in_chunks(x), in_chunks(targets)))
    return losses.reshape(-1)


def batch_losses(weights: Weights, tokens: jax.Array, config: Config, **options: Any) -> jax.Array:
    """`sequence_losses` of each row of `[batch, sequence + 1]`."""
    return jax.vmap(lambda row: sequence_losses(weights, row, config, **options))(tokens)


# What it costs.


def parameter_count(weights: Weights) -> int:
    """Numbers in the weights, the fast ones among them."""
    return sum(x.size for x in jax.tree.leaves(weights))


def training_operations(config: Config) -> float:
    """Multiplications and additions of one token's share of a training step, nothing counted twice for recomputing.

    A gradient costs two forwards, and the outer gradient is taken of whatever the loss computes: the
    forward pass and, in mode "ttt", the inner gradient, of activations down to the lowest fast MLP, which
    stands above its block's attention, and of the fast weights.
    """
    mlp = 3 * config.width * config.hidden
    reach = config.sequence if config.mode == "full" else min(config.window, config.sequence)
    # Keys a token sees on average: the first `reach` tokens see half of that.
    keys = reach - reach * (reach - 1) / (2 * config.sequence)
    projections, attention = 4 * config.width ** 2, 2 * config.width * keys
    logits, fast = config.vocabulary * config.width, config.fast_layers
    forward = config.layers * (projections + attention + mlp) + fast * mlp + logits
    # Both factors of attention's products are activations.
    inner = logits + fast * 3 * mlp + (fast - 1) * (projections + 2 * attention)
    return 2 * 3 * (forward + (inner if config.mode == "ttt" else 0))
