"""Which tiles are whose: the block that a program takes, and the tiles that it meets, in which order.

A program holds a block of queries (or of keys) and walks over the tiles of keys (or of queries, of all heads that
share its keys) that the mask lets it meet; a kernel for gradients of a bias takes one tile of the bias and walks over
the tiles of scores that this was added to.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jttt.kernels.tiles import own_batch

# Twice `blocks.AT_ONCE`: as many as even each other out, by a simulation.
ENOUGH_PROGRAMS = tl.constexpr(528)


# Programs


@triton.jit
def query_program(T, S, C: tl.constexpr):
    """(block, head, batch) of a program with a block of queries. A group of heads streams the same keys."""
    heads = cached_rows(C) // S * C.group
    return program(tl.cdiv(T, C.blocks.queries), heads, C.layout.query.heads, C.band.right is not None, C)


@triton.jit
def key_program(T, S, C: tl.constexpr):
    """(block, head, batch) of a program with a block of keys, which streams the queries of a group of heads."""
    heads = cached_rows(C) // C.group // T
    return program(tl.cdiv(S, C.blocks.keys), heads, C.layout.key.heads, C.band.right is None, C)


@triton.constexpr_function
def cached_rows(C):
    """How many rows of what a kernel streams stay in a cache of 32 MiB, for numbers of two bytes. Where it streams
    queries, they and what comes with them are as wide as keys and values."""
    streamed = [layout for layout in (C.layout.key, C.layout.value, C.layout.t_key, C.layout.t_value) if layout]
    return 2**25 // (2 * sum(layout.width for layout in streamed))


@triton.jit
def program(blocks, heads, HEADS: tl.constexpr, LAST_FIRST: tl.constexpr, C: tl.constexpr):
    """This program's (block, head, batch).

    Blocks of one head are neighbours, so they share what they stream through the L2 cache. Where they have unequal
    work, all longest ones come first instead, with LAST_FIRST the last block of every head: a long one that starts
    last would leave the rest of the GPU waiting. `heads` at a time, though, as many as that cache has room for, or
    more if these were too few programs to even each other out.
    """
    index = tl.program_id(0)
    if C.band.slanted:
        all_heads = tl.num_programs(0) // blocks
        heads = tl.minimum(tl.maximum(heads, tl.cdiv(ENOUGH_PROGRAMS, blocks)), all_heads)
        first = index // (heads * blocks) * heads
        index = index % (heads * blocks)
        heads = tl.minimum(heads, all_heads - first)
        block = index // heads
        other = first + index % heads
        if LAST_FIRST:
            block = blocks - 1 - block
    else:
        block = index % blocks
        other = index // blocks
    return block, other % HEADS, other // HEADS


# Walks


class Walk(NamedTuple):
    """The tiles that a block meets. Those in [full_begin, full_end) are visible to all of it, and whole; the rest of
    [begin, end) needs a mask; what is outside is hidden.

    Tile block · members + m is of the m-th head of the `members` that are met. With a block list (`masks.block_list`)
    the four are places in this block's part of it, `listed`, and `named` says how many heads it tells from each other,
    all or one.
    """

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    listed: Any
    named: Any
    first_head: Any
    members: Any


@triton.jit
def walk_keys(block, block_list, block_counts, batch, head, T, S, C: tl.constexpr):
    """The tiles of keys that a block of queries of `head` meets."""
    return walk(block, block_list, block_counts, batch, head, T, S, C.band.left, C.band.right, C.blocks.queries,
                C.blocks.keys, head // C.group, 1, C)


@triton.jit
def walk_queries(block, block_list, block_counts, batch, kv_head, T, S, C: tl.constexpr):
    """The tiles of queries, of all heads that share `kv_head`, that a block of keys meets."""
    return walk(block, block_list, block_counts, batch, kv_head, S, T, C.band.right, C.band.left, C.blocks.keys,
                C.blocks.queries, kv_head * C.group, C.group, C)


@triton.jit
def walk(block, block_list, block_counts, batch, head, length, other_length, LEFT: tl.constexpr,
         RIGHT: tl.constexpr, BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr, first_head, MEMBERS: tl.constexpr,
         C: tl.constexpr):
    """This program's share of what a block meets: position p meets p - LEFT … p + RIGHT."""
    if block_list is not None:
        L: tl.constexpr = C.layout.block_list
        index = own_batch(batch, L) * L.heads
        if L.heads > 1:
            index += head
        index = index * tl.cdiv(length, BLOCK) + block
        alike: tl.constexpr = MEMBERS // L.width
        full = tl.load(block_counts + index * 2) * alike
        mixed = tl.load(block_counts + index * 2 + 1) * alike
        listed = block_list + index * (tl.cdiv(other_length, OTHER_BLOCK) * L.width)
        return own_share(Walk(0, 0, full, full + mixed, listed, L.width, first_head, MEMBERS), C)
    else:
        first = block * BLOCK
        last = tl.minimum(first + BLOCK, length) - 1
        begin = first * 0
        full_begin = begin
        end = tl.cdiv(other_length, OTHER_BLOCK)
        full_end = other_length // OTHER_BLOCK
        if LEFT is not None:
            begin = tl.minimum(tl.maximum(first - LEFT, 0) // OTHER_BLOCK, end)
            full_begin = tl.cdiv(tl.maximum(last - LEFT, 0), OTHER_BLOCK)
        if RIGHT is not None:
            end = tl.maximum(begin, tl.minimum(end, tl.cdiv(tl.maximum(last + RIGHT + 1, 0), OTHER_BLOCK)))
            full_end = tl.minimum(full_end, tl.maximum(first + RIGHT + 1, 0) // OTHER_BLOCK)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
        return own_share(Walk(begin * MEMBERS, full_begin * MEMBERS, full_end * MEMBERS, end * MEMBERS, None, MEMBERS,
                              first_head, MEMBERS), C)


@triton.jit
def own_share(w, C: tl.constexpr):
    """The part of a walk that falls to this program where several share a block's work."""
    if C.shares > 1:
        share = tl.program_id(1)
        begin = w.begin + (w.end - w.begin) * share // C.shares
        end = w.begin + (w.end - w.begin) * (share + 1) // C.shares
        full_begin = tl.minimum(tl.maximum(w.full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(w.full_end, full_begin), end)
        return Walk(begin, full_begin, full_end, end, w.listed, w.named, w.first_head, w.members)
    else:
        return w


@triton.jit
def steps(w, MASKED: tl.constexpr):
    """How many tiles of a walk need a mask, or how many need none."""
    return (w.full_begin - w.begin) + (w.end - w.full_end) if MASKED else w.full_end - w.full_begin


@triton.jit
def step(w, i, MASKED: tl.constexpr):
    """(block, head) of the i-th tile that needs a mask (those before the full ones, then those after), or none."""
    if MASKED:
        before = w.full_begin - w.begin
        return tile_at(w, tl.where(i < before, w.begin + i, w.full_end + i - before))
    else:
        return tile_at(w, w.full_begin + i)


@triton.jit
def visited(w, i):
    """(block, head) of the i-th tile of a walk, those that need no mask first; anything past the last."""
    full = w.full_end - w.full_begin
    before = w.full_begin - w.begin
    mixed = i - full
    return tile_at(w, tl.where(mixed < 0, w.full_begin + i,
                               tl.where(mixed < before, w.begin + mixed, w.full_end + mixed - before)))


@triton.jit
def tile_at(w, place):
    """(block, head) of a tile by its place."""
    tile = place
    if w.listed is not None:
        alike: tl.constexpr = w.members // w.named
        tile = tl.load(w.listed + place // alike, mask=place < w.end, other=0) * alike + place % alike
    return tile // w.members, w.first_head + tile % w.members


# Gradients of a bias


@triton.jit
def bias_program(T, S, C: tl.constexpr):
    """This program's place in the bias: (block of rows, block of columns, head, batch)."""
    L: tl.constexpr = C.layout.bias
    row_blocks = tl.cdiv(T, C.blocks.queries) if L.rows else 1
    column_blocks = tl.cdiv(S, C.blocks.keys) if L.columns else 1
    index = tl.program_id(0)
    column_block = index % column_blocks
    index = index // column_blocks
    row_block = index % row_blocks
    index = index // row_blocks
    return row_block, column_block, index % L.heads, index // L.heads


@triton.jit
def bias_tile_is_hidden(tile_status, row_block, column_block, head, batch, T, S, C: tl.constexpr):
    """Whether nothing is visible in a tile, by `masks.tile_status`; None stands for no mask at all."""
    if tile_status is None:
        return False
    else:
        L: tl.constexpr = C.layout.tile_status
        index = own_batch(batch, L) * L.heads
        if L.heads > 1:
            index += head
        index = index * tl.cdiv(T, C.blocks.queries) + row_block
        return tl.load(tile_status + index * tl.cdiv(S, C.blocks.keys) + column_block) == 0


@triton.jit
def bias_shares(T, S, C: tl.constexpr):
    """How many tiles of scores one tile of the bias was added to."""
    L: tl.constexpr = C.layout.bias
    count = C.layout.query.heads // L.heads * C.bias_batch
    if not L.rows:
        count = count * tl.cdiv(T, C.blocks.queries)
    if not L.columns:
        count = count * tl.cdiv(S, C.blocks.keys)
    return count


@triton.jit
def bias_share(i, row_block, column_block, head, batch, T, S, C: tl.constexpr):
    """The i-th of these tiles: (block of rows, block of columns, head, batch of the launch)."""
    L: tl.constexpr = C.layout.bias
    if not L.rows:
        row_block = i % tl.cdiv(T, C.blocks.queries)
        i = i // tl.cdiv(T, C.blocks.queries)
    if not L.columns:
        column_block = i % tl.cdiv(S, C.blocks.keys)
        i = i // tl.cdiv(S, C.blocks.keys)
    if L.heads == 1:
        head = i % C.layout.query.heads
        i = i // C.layout.query.heads
    return row_block, column_block, head, batch * C.bias_batch + i
