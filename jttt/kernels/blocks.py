"""Block sizes: a table that people can read, by GPU, kernel, head width and size of a number.

Rows of a GPU are produced there by `python -m benchmarks.tune --write`, the fastest of what it times; rows that
nobody has timed hold what fits, by `python -m benchmarks.resources`. That says what each row spills, without
a GPU, and with `--write` puts it here.
"""

from __future__ import annotations

import dataclasses

from jttt.kernels.config import Blocks

# {capability: {(kernel, widest head in registers, bytes of a number): Blocks}}. A GPU takes the
# largest capability that is not above its own; a width takes the next one up.
TABLE: dict[int, dict[tuple[str, int, int], Blocks]] = {
    80: {
        ("forward_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("d_query_kernel", 64, 2): Blocks(64, 64, 4, 2, spilled=20),
        ("d_key_value_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("d_bias_kernel", 64, 2): Blocks(64, 64, 4, 2, spilled=40),
        ("tangent_kernel", 64, 2): Blocks(64, 64, 4, 2, spilled=8),
        ("g_query_kernel", 64, 2): Blocks(64, 64, 4, 2, spilled=168),
        ("g_key_value_kernel", 64, 2): Blocks(64, 64, 4, 2, spilled=184),
        ("g_bias_kernel", 64, 2): Blocks(32, 32, 4, 2, spilled=124),
        ("forward_kernel", 128, 2): Blocks(64, 32, 8, 2),
        ("d_query_kernel", 128, 2): Blocks(64, 32, 8, 2),
        ("d_key_value_kernel", 128, 2): Blocks(32, 64, 8, 2),
        ("d_bias_kernel", 128, 2): Blocks(64, 32, 8, 2),
        ("tangent_kernel", 128, 2): Blocks(64, 32, 8, 2, spilled=108),
        ("g_query_kernel", 128, 2): Blocks(64, 32, 8, 2, spilled=80),
        ("g_key_value_kernel", 128, 2): Blocks(32, 64, 8, 2, spilled=12),
        ("g_bias_kernel", 128, 2): Blocks(32, 32, 8, 2, spilled=1552),
        ("forward_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("d_query_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("d_key_value_kernel", 256, 2): Blocks(16, 32, 8, 2),
        ("d_bias_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("tangent_kernel", 256, 2): Blocks(32, 16, 8, 2, spilled=180),
        ("g_query_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("g_key_value_kernel", 256, 2): Blocks(16, 32, 8, 2),
        ("g_bias_kernel", 256, 2): Blocks(32, 16, 8, 2, spilled=4480),
        ("forward_kernel", 64, 4): Blocks(32, 32, 4, 2),
        ("d_query_kernel", 64, 4): Blocks(32, 32, 4, 2),
        ("d_key_value_kernel", 64, 4): Blocks(32, 32, 4, 2, spilled=16),
        ("d_bias_kernel", 64, 4): Blocks(32, 32, 8, 1, spilled=100),
        ("tangent_kernel", 64, 4): Blocks(32, 32, 4, 2, spilled=716),
        ("g_query_kernel", 64, 4): Blocks(32, 32, 8, 1, spilled=8),
        ("g_key_value_kernel", 64, 4): Blocks(16, 16, 4, 1),
        ("g_bias_kernel", 64, 4): Blocks(16, 16, 4, 1, spilled=160),
        ("forward_kernel", 128, 4): Blocks(32, 16, 8, 1),
        ("d_query_kernel", 128, 4): Blocks(32, 16, 8, 1),
        ("d_key_value_kernel", 128, 4): Blocks(16, 32, 8, 1, spilled=128),
        ("d_bias_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=688),
        ("tangent_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=620),
        ("g_query_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=800),
        ("g_key_value_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=412),
        ("g_bias_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=11180),
        ("forward_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=24),
        ("d_query_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=260),
        ("d_key_value_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=336),
        ("d_bias_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=9388),
        ("tangent_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=14896),
        ("g_query_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=23152),
        ("g_key_value_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=24152),
        ("g_bias_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=20528),
    },
    90: {
        ("forward_hopper", 64, 2): Blocks(64, 64, 4, 2),
        ("d_query_hopper", 64, 2): Blocks(64, 64, 4, 2),
        ("d_key_value_hopper", 64, 2): Blocks(64, 64, 4, 2, most_registers=168),
        ("tangent_hopper", 64, 2): Blocks(64, 64, 4, 2),
        ("g_query_hopper", 64, 2): Blocks(64, 64, 4, 2),
        ("g_key_value_hopper", 64, 2): Blocks(64, 64, 4, 2, spilled=32),
        ("forward_hopper", 128, 2): Blocks(64, 64, 4, 2),
        ("d_query_hopper", 128, 2): Blocks(64, 64, 4, 2),
        ("d_key_value_hopper", 128, 2): Blocks(64, 64, 4, 2),
        ("tangent_hopper", 128, 2): Blocks(128, 64, 8, 2, spilled=60),
        ("g_query_hopper", 128, 2): Blocks(128, 64, 8, 2, spilled=4),
        ("g_key_value_hopper", 128, 2): Blocks(32, 64, 4, 2, spilled=28),
        ("forward_kernel", 64, 2): Blocks(64, 64, 4, 3),
        ("d_query_kernel", 64, 2): Blocks(64, 128, 4, 3),
        ("d_key_value_kernel", 64, 2): Blocks(64, 64, 4, 3),
        ("d_bias_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("tangent_kernel", 64, 2): Blocks(128, 64, 4, 2, spilled=44),
        ("g_query_kernel", 64, 2): Blocks(64, 64, 4, 2),
        ("g_key_value_kernel", 64, 2): Blocks(32, 64, 4, 2),
        ("g_bias_kernel", 64, 2): Blocks(64, 64, 4, 1, spilled=160),
        ("forward_kernel", 128, 2): Blocks(128, 128, 8, 3),
        ("d_query_kernel", 128, 2): Blocks(128, 64, 8, 3),
        ("d_key_value_kernel", 128, 2): Blocks(64, 64, 4, 2, spilled=28),
        ("d_bias_kernel", 128, 2): Blocks(64, 64, 4, 1, spilled=152),
        ("tangent_kernel", 128, 2): Blocks(128, 64, 8, 2),
        ("g_query_kernel", 128, 2): Blocks(64, 32, 4, 2, spilled=68),
        ("g_key_value_kernel", 128, 2): Blocks(32, 128, 8, 2, spilled=20),
        ("g_bias_kernel", 128, 2): Blocks(64, 32, 4, 1, spilled=372),
        ("forward_kernel", 256, 2): Blocks(64, 32, 4, 2, spilled=20),
        ("d_query_kernel", 256, 2): Blocks(64, 32, 8, 2),
        ("d_key_value_kernel", 256, 2): Blocks(64, 32, 8, 1),
        ("d_bias_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("tangent_kernel", 256, 2): Blocks(16, 64, 8, 2),
        ("g_query_kernel", 256, 2): Blocks(32, 16, 8, 2),
        ("g_key_value_kernel", 256, 2): Blocks(64, 16, 8, 2),
        ("g_bias_kernel", 256, 2): Blocks(32, 16, 8, 2, spilled=680),
        ("forward_kernel", 64, 4): Blocks(64, 32, 4, 2),
        ("d_query_kernel", 64, 4): Blocks(64, 32, 8, 2),
        ("d_key_value_kernel", 64, 4): Blocks(32, 64, 8, 1),
        ("d_bias_kernel", 64, 4): Blocks(32, 32, 8, 1, spilled=64),
        ("tangent_kernel", 64, 4): Blocks(64, 32, 8, 1),
        ("g_query_kernel", 64, 4): Blocks(64, 32, 8, 1, spilled=24),
        ("g_key_value_kernel", 64, 4): Blocks(16, 16, 4, 1),
        ("g_bias_kernel", 64, 4): Blocks(16, 16, 4, 1, spilled=320),
        ("forward_kernel", 128, 4): Blocks(64, 16, 8, 2, spilled=56),
        ("d_query_kernel", 128, 4): Blocks(32, 16, 8, 1, spilled=24),
        ("d_key_value_kernel", 128, 4): Blocks(16, 16, 4, 1, spilled=12),
        ("d_bias_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=704),
        ("tangent_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=636),
        ("g_query_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=716),
        ("g_key_value_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=412),
        ("g_bias_kernel", 128, 4): Blocks(16, 16, 8, 1, spilled=11968),
        ("forward_kernel", 256, 4): Blocks(16, 16, 8, 1),
        ("d_query_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=152),
        ("d_key_value_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=424),
        ("d_bias_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=9088),
        ("tangent_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=14756),
        ("g_query_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=22468),
        ("g_key_value_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=24600),
        ("g_bias_kernel", 256, 4): Blocks(16, 16, 8, 1, spilled=21412),
    },
}


def choose(kernel: str, width: int, itemsize: int, capability: int, dense: bool = False) -> Blocks:
    """Blocks of `kernel` for heads of up to `width` numbers of `itemsize` bytes.

    With entries to look up one by one (mask, bias, segments), tiles of 64 keys; and one stage less where the compiler
    makes the stages, since it then streams these too, and in Hopper's programs of eight warps, since the entries take
    32 KB of shared memory on their way into a tile's layout.
    """
    # 12.x has no more shared memory than 8.6, and none of the matrix instructions of 9.0.
    known = [table for table in TABLE if table <= (80 if capability >= 120 else capability)]
    table = TABLE[max(known, default=min(TABLE))]
    fitting = [row for row in table if row[0] == kernel and row[1] >= width and row[2] == itemsize]
    cut = table[min(fitting, key=lambda row: row[1])]
    if dense:
        stages = cut.stages if kernel.endswith("_hopper") and cut.warps == 4 else max(cut.stages - 1, 1)
        cut = dataclasses.replace(cut, keys=min(cut.keys, 64), stages=stages)
    return cut


# Programs that run at once: two on each of a Hopper GPU's 132 multiprocessors.
AT_ONCE = 264


def shares(programs: int, tiles: int, alike: bool, at_once: int = AT_ONCE) -> int:
    """How many programs should share the work of one, of which there are `programs` with up to `tiles` tiles each.

    One, unless that leaves a GPU partly idle: then the fewest for which it is busy, nearly as well as can be, and
    each has eight tiles at least, since adding up what they made is one more kernel to launch. `alike` says whether
    all have the same work; under a causal mask they have half of the most on average, and the longest come first.
    """
    if programs >= at_once:
        return 1

    def time(count: int) -> float:
        """In units of the most work that a program has."""
        if alike:
            return -(-programs * count // at_once) / count
        return max(1 / count, programs / (2 * at_once))

    # Powers of two: each count is a kernel to compile, and lengths vary.
    counts = [count for count in (1, 2, 4, 8, 16) if count == 1 or 8 * count <= tiles]
    return next(count for count in counts if time(count) <= 1.1 * min(map(time, counts)))
