"""Block sizes: a table that people can read, by GPU, kernel, head width and size of a number."""

from __future__ import annotations

from jttt.kernels.config import Blocks

# {capability: {(kernel, widest head in registers, bytes of a number): Blocks}}. A GPU takes the
# largest capability that is not above its own; a width takes the next one up.
TABLE: dict[int, dict[tuple[str, int, int], Blocks]] = {
    90: {
        ("forward_kernel", 64, 2): Blocks(64, 64, 4, 3),
        ("forward_kernel", 128, 2): Blocks(128, 128, 8, 3),
        ("forward_kernel", 256, 2): Blocks(64, 32, 4, 2),
        ("d_query_kernel", 64, 2): Blocks(64, 128, 4, 3),
        ("d_query_kernel", 128, 2): Blocks(128, 64, 8, 3),
        ("d_query_kernel", 256, 2): Blocks(64, 32, 8, 2),
        ("d_key_value_kernel", 64, 2): Blocks(64, 64, 4, 3),
        ("d_key_value_kernel", 128, 2): Blocks(64, 64, 4, 2),
        ("d_key_value_kernel", 256, 2): Blocks(64, 32, 8, 1),
        ("d_bias_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("d_bias_kernel", 128, 2): Blocks(64, 64, 4, 1),
        ("d_bias_kernel", 256, 2): Blocks(32, 32, 4, 1),
        ("tangent_kernel", 64, 2): Blocks(128, 64, 4, 2),
        ("tangent_kernel", 128, 2): Blocks(128, 64, 8, 2),
        ("tangent_kernel", 256, 2): Blocks(16, 64, 8, 2),
        ("g_query_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("g_query_kernel", 128, 2): Blocks(64, 32, 4, 2),
        ("g_query_kernel", 256, 2): Blocks(64, 16, 4, 1),
        ("g_key_value_kernel", 64, 2): Blocks(32, 64, 4, 2),
        ("g_key_value_kernel", 128, 2): Blocks(32, 128, 8, 2),
        ("g_key_value_kernel", 256, 2): Blocks(64, 16, 8, 2),
        ("g_bias_kernel", 64, 2): Blocks(64, 64, 4, 1),
        ("g_bias_kernel", 128, 2): Blocks(64, 32, 4, 1),
        ("g_bias_kernel", 256, 2): Blocks(32, 16, 4, 1),
        ("forward_kernel", 64, 4): Blocks(64, 32, 4, 2),
        ("forward_kernel", 128, 4): Blocks(64, 16, 8, 2),
        ("forward_kernel", 256, 4): Blocks(32, 16, 8, 1),
        ("d_query_kernel", 64, 4): Blocks(64, 32, 8, 2),
        ("d_query_kernel", 128, 4): Blocks(64, 16, 8, 1),
        ("d_query_kernel", 256, 4): Blocks(32, 16, 8, 1),
        ("d_key_value_kernel", 64, 4): Blocks(32, 64, 8, 1),
        ("d_key_value_kernel", 128, 4): Blocks(16, 64, 8, 1),
        ("d_key_value_kernel", 256, 4): Blocks(16, 32, 8, 1),
        ("d_bias_kernel", 64, 4): Blocks(32, 32, 4, 1),
        ("d_bias_kernel", 128, 4): Blocks(32, 32, 8, 1),
        ("d_bias_kernel", 256, 4): Blocks(16, 16, 4, 1),
        ("tangent_kernel", 64, 4): Blocks(64, 32, 8, 1),
        ("tangent_kernel", 128, 4): Blocks(32, 16, 8, 1),
        ("tangent_kernel", 256, 4): Blocks(32, 16, 8, 1),
        ("g_query_kernel", 64, 4): Blocks(64, 32, 8, 1),
        ("g_query_kernel", 128, 4): Blocks(32, 16, 8, 1),
        ("g_query_kernel", 256, 4): Blocks(16, 16, 8, 1),
        ("g_key_value_kernel", 64, 4): Blocks(32, 32, 8, 1),
        ("g_key_value_kernel", 128, 4): Blocks(16, 32, 8, 1),
        ("g_key_value_kernel", 256, 4): Blocks(16, 16, 8, 1),
        ("g_bias_kernel", 64, 4): Blocks(32, 32, 4, 1),
        ("g_bias_kernel", 128, 4): Blocks(16, 16, 4, 1),
        ("g_bias_kernel", 256, 4): Blocks(16, 16, 8, 1),
    },
}


def choose(kernel: str, width: int, itemsize: int, capability: int) -> Blocks:
    """Blocks of `kernel` for heads of up to `width` numbers of `itemsize` bytes."""
    table = TABLE[max((known for known in TABLE if known <= capability), default=min(TABLE))]
    fitting = [row for row in table if row[0] == kernel and row[1] >= width and row[2] == itemsize]
    return table[min(fitting, key=lambda row: row[1])]
