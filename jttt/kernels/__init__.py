"""Triton kernels for the four passes of `jttt.passes`, on arrays as the public function has them.

    forward           forward_kernel
    backward          d_query_kernel, d_key_value_kernel
    tangent           tangent_kernel
    double_backward   g_query_kernel, g_key_value_kernel

`tiles.py` is what the kernels share, `config.py` what they know at compile time, `blocks.py` their
block sizes, and `launch.py` puts them on a device or through Triton's interpreter.
"""

from jttt.kernels.launch import launches, run

__all__ = ["launches", "run"]
