"""What `jttt/DESIGN.md` states in numbers."""

import re
from pathlib import Path

import jttt
from benchmarks import tune
from jttt.kernels import launch

DESIGN = (Path(jttt.__file__).parent / "DESIGN.md").read_text()


def test_products_are_those_that_the_kernels_make():
    stated = {name: int(count) for name, count in re.findall(r"\| (\w+_kernel) \| (\d+) \|", DESIGN)}
    assert stated == tune.PRODUCTS


def test_every_kernel_is_in_the_diagram():
    kernels = {entry[0].__name__ for entries in launch.KERNELS.values() for entry in entries}
    assert kernels == set(re.findall(r"\w+_kernel\b", DESIGN.split("## The mathematics")[0]))
