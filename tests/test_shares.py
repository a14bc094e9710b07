"""Several programs that share the work of one block, where there are too few to fill a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt
from jttt.kernels import blocks, schedule
from tests import plain

CASES = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (20, 5)},
    # One row of the batch sees nothing, and blocks come from a list.
    "lengths": {"key_value_seq_lengths": np.array([0, 55], np.int32)},
}


@pytest.mark.parametrize("case", CASES)
def test_shares_add_up_to_the_whole(case, monkeypatch):
    monkeypatch.setattr(blocks, "shares", lambda *_: 3)
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.standard_normal(shape, np.float32))
              for shape in ((2, 70, 2, 16), (2, 90, 1, 16), (2, 90, 1, 24))]

    def orders(implementation):
        def attend(*arrays):
            return jttt.dot_product_attention(*arrays, implementation=implementation, return_residual=True,
                                              **CASES[case])

        def loss(*arrays):
            output, lse = attend(*arrays)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        second = jax.grad(lambda *arrays: sum(jnp.sum(jnp.sin(x)) for x in gradient(*arrays)), argnums=(0, 1, 2))
        output, lse = attend(*arrays)
        return output, jnp.exp(lse), *gradient(*arrays), *second(*arrays)

    for mine, expected in zip(jax.jit(orders, static_argnums=0)("triton"), orders("xla"), strict=True):
        assert plain.error(mine, np.asarray(expected, np.float64)) < 3e-6


@pytest.mark.parametrize(("programs", "at_once", "tiles", "alike", "expected"), [
    (264, 264, 100, True, 1),  # a full GPU
    (10_000, 264, 100, False, 1),
    (128, 264, 128, True, 2),  # half of one
    (132, 132, 128, True, 1),  # a full one, of programs twice as large
    (128, 132, 128, False, 2),
    (192, 264, 144, True, 4),  # 2.9 rounds of a quarter each, not one of a whole
    (32, 264, 64, True, 8),
    (8, 264, 16, True, 2),  # eight tiles at least
    (8, 264, 15, True, 1),
    (1, 264, 1, True, 1),
    (256, 264, 64, True, 1),
    (256, 264, 64, False, 2),  # a round as long as its longest program, when the average is half of that
])
def test_programs_share_their_work_only_if_the_gpu_would_be_idle(programs, at_once, tiles, alike, expected):
    assert blocks.shares(programs, tiles, alike, at_once) == expected


def test_enough_programs_are_twice_those_at_once():
    """Kernels have a constant of their own, since they cannot read that of the table."""
    assert schedule.ENOUGH_PROGRAMS.value == 2 * blocks.AT_ONCE
