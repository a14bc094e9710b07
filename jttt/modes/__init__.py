"""Other ways to carry out the backward of attention, to compare with and for short sequences.

The main path does not know them. `attention.py` is the public function, `rules.py` has the derivative
rules, `passes.py` the primitive that becomes kernels or plain formulas when it is lowered, `plain.py`
these formulas, and `kernels.py` the Triton kernels of the modes that store P.
"""

from jttt.modes.attention import BWD_MODES, dot_product_attention

__all__ = ["BWD_MODES", "dot_product_attention"]
