"""Triton kernels for the four passes of `jttt.passes`, on arrays as the public function has them.

    forward           forward_kernel
    backward          d_query_kernel, d_key_value_kernel, d_bias_kernel
    tangent           tangent_kernel
    double_backward   g_query_kernel, g_key_value_kernel, g_bias_kernel

`tiles.py` is what the kernels share, `config.py` what they know at compile time, `blocks.py` their
block sizes, and `launch.py` puts them on a device or, by `interpreter.py`, through Triton's interpreter.
`hopper/` has the same kernels for Hopper's own instructions; `cost.py` says what a launch costs.
"""

from jttt.kernels.launch import launches, run

__all__ = ["launches", "run"]
