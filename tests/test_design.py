"""What `jttt/DESIGN.md` states in numbers."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jttt.modes
from benchmarks import tune
from jttt.kernels import launch
from jttt.modes import kernels as modes_kernels

DESIGN = (Path(jttt.__file__).parent / "DESIGN.md").read_text()


def test_products_are_those_that_the_kernels_make():
    stated = {name: int(count) for name, count in re.findall(r"\| (\w+_kernel) \| (\d+) \|", DESIGN)}
    assert stated == tune.PRODUCTS


def test_every_kernel_is_in_the_diagram():
    kernels = {entry[0].__name__ for entries in launch.KERNELS.values() for entry in entries}
    assert kernels == set(re.findall(r"\w+_kernel\b", DESIGN.split("## The mathematics")[0]))


def test_every_kernel_has_its_pseudocode():
    kernels = {entry[0].__name__ for entries in launch.KERNELS.values() for entry in entries}
    section = DESIGN.split("## The kernels, one by one")[1].split("\n## ")[0]
    assert kernels == set(re.findall(r"\w+_kernel\b", section))


def test_products_of_the_modes_are_those_that_their_kernels_make():
    stated = {name: int(count) for name, count in 
              re.findall(r"\| `(\w+)` \| (\d+) \|", DESIGN.split("| pass | products |")[1])}
    made = {name: len(re.findall(r"\b(?:product|scores_at)\(", inspect.getsource(kernel.fn)))
            for name, (kernel, _) in modes_kernels.KERNELS.items()}
    assert stated == made


def saved(function, *arrays):
    """Shapes of the arrays that a function keeps for its derivative."""
    return [x.shape for x in jax.tree.leaves(jax.vjp(function, *arrays)[1]) if getattr(x, "size", 0) > 1]


def orders(mode):
    attention = functools.partial(jttt.modes.dot_product_attention, bwd_mode=mode)
    return attention, lambda query, key, value, d_output: jax.vjp(attention, query, key, value)[1](d_output)


def test_numbers_that_are_saved_a_token():
    T, H = 40, 8
    arrays = [jnp.ones((1, T, 1, H)) for _ in range(4)]
    stated = re.findall(r"saved: .* (\d)H \+ (\d) numbers a token", DESIGN)
    for (rows, columns), function, taken in zip(stated, orders("flash"), (arrays[:3], arrays), strict=True):
        assert sum(map(np.prod, saved(function, *taken))) == T * (int(rows) * H + int(columns))


@pytest.mark.parametrize("mode", jttt.modes.BWD_MODES)
def test_arrays_that_a_mode_keeps(mode):
    T, S, H = 40, 24, 8
    arrays = [jnp.ones((1, length, 1, H)) for length in (T, S, S, T)]
    stated = re.search(rf"\| `{mode}` \| (\d) \| (\d|several) \|", DESIGN).groups()
    for count, function, taken in zip(stated, orders(mode), (arrays[:3], arrays), strict=True):
        kept = sum(shape[-2:] == (T, S) for shape in saved(function, *taken))
        assert kept > 1 if count == "several" else kept == int(count)
