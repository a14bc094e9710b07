"""What the kernels for Hopper share: tiles that the copy engine brings to shared memory, some ahead of use.

A stream is (arrays, buffers, arrived): arrays that advance together, such as (key, value), each a tensor
descriptor or None; room for `stages` tiles of each; and one barrier a stage, on which its tiles arrive.
Their layouts travel beside it, in a tuple L. Tiles are [rows, padded width], zero outside of an array.

A kernel's loop turns tile by tile: `arrive` waits for the tiles of this turn, and products that read them are queued.
LEAD tiles are on their way when it begins. With all places filled then, `behind` asks for the next tile when nothing
reads those of this turn any more. With one left free, `ahead` asks while the first products run. Asking is slow: Triton
has all warps meet before a barrier is armed and between any two requests, and one of them makes the requests. Which
is faster, and by how much, is a question to the GPU ("Requests behind products" in benchmarks/NOTES.md).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jttt.kernels import schedule, tiles


@gluon.jit
def queries_at(T, S, block_list, block_counts, C: gl.constexpr):
    """A program with a block of queries: (head, batch, first row, its walk, how many tiles of that are wholly visible,
    how many there are)."""
    block, head, batch = schedule.query_program(T, S, C)
    walk = schedule.walk_keys(block, block_list, block_counts, batch, head, T, S, C)
    full = schedule.steps(walk, False)
    return head, batch, block * C.blocks.queries, walk, full, full + schedule.steps(walk, True)


@triton.constexpr_function
def layouts(C, *names):
    return tuple(getattr(C.layout, name) for name in names)


@triton.constexpr_function
def accumulator(width, C):
    """Layout of a product with `width` columns, 16 rows to a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.blocks.warps, 1], instr_shape=[16, width, 16])


@triton.constexpr_function
def left_operand(width, C):
    """Layout in registers of what multiplies a tile in shared memory, for a product of `accumulator(width, C)`."""
    return gl.DotOperandLayout(0, accumulator(width, C), 2)


@triton.constexpr_function
def stage_bytes(L, rows):
    return sum(2 * rows * tiles.padded(layout.width) for layout in L if layout is not None)


@gluon.jit
def make(arrays, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """A stream of which nothing is on its way yet. Call `publish` after the last was made."""
    buffers = ()
    for i in gl.static_range(len(arrays)):
        if arrays[i] is None:
            buffers += (0, )  # An absent array needs no buffer; a tuple that is added to cannot hold None.
        else:
            buffers += (gl.allocate_shared_memory(
                arrays[i].dtype, [STAGES, 1, ROWS, 1, tiles.padded(L[i].width)], arrays[i].layout), )
    return arrays, buffers, barriers(STAGES, 1)


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that each let through once COUNT have arrived there."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), count=COUNT)
    return made


@gluon.jit
def publish():
    """Shows the copy engine barriers that were just made."""
    fence_async_shared()


@gluon.jit
def arm(stream, L: gl.constexpr, ROWS: gl.constexpr, stage, wanted):
    arrays, buffers, arrived = stream
    mbarrier.expect(arrived.index(stage), stage_bytes(L, ROWS), pred=wanted)


@gluon.jit
def ask(stream, L: gl.constexpr, stage, batch, head, start, wanted):
    """Sets the tiles that begin at row `start` on their way, if they are wanted; the stage is armed."""
    arrays, buffers, arrived = stream
    for i in gl.static_range(len(arrays)):
        if arrays[i] is not None:
            own = tiles.own_batch(batch, L[i]).to(gl.int32)
            tma.async_load(arrays[i], [own, start, head, 0], arrived.index(stage), buffers[i].index(stage), pred=wanted)


@gluon.jit
def fetch(stream, L: gl.constexpr, ROWS: gl.constexpr, batch, head, start):
    """Sets the one tile of a stream with one stage on its way; `wait` for it in turn 0."""
    arm(stream, L, ROWS, 0, True)
    ask(stream, L, 0, batch, head, start, True)


@gluon.jit
def wait(stream, turn, STAGES: gl.constexpr, wanted):
    arrays, buffers, arrived = stream
    mbarrier.wait(arrived.index(turn % STAGES), (turn // STAGES) & 1, pred=wanted)


@gluon.jit
def bring(stream, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, walk, count, i, batch):
    """Sets tile i of a walk of `count` tiles on its way, if there is one."""
    arm(stream, L, ROWS, i % STAGES, i < count)
    follow(stream, L, ROWS, i % STAGES, walk, count, i, batch)


@gluon.jit
def follow(stream, L: gl.constexpr, ROWS: gl.constexpr, stage, walk, count, i, batch):
    """The same where the stage is armed."""
    block, head = schedule.visited(walk, i)
    ask(stream, L, stage, batch, head, block * ROWS, i < count)


@gluon.jit
def start(stream, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, batch):
    """Sets the first LEAD tiles of a walk on their way."""
    for i in gl.static_range(LEAD):
        bring(stream, L, ROWS, STAGES, walk, count, i, batch)


@gluon.jit
def arrive(stream, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, count, i):
    """Waits for tile i of a walk; returns its stage, armed for what `behind` asks for."""
    wait(stream, i, STAGES, True)
    stage = i % STAGES
    if LEAD == STAGES:
        arm(stream, L, ROWS, stage, i + STAGES < count)
    return stage


@gluon.jit
def ahead(stream, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, i,
          batch):
    """Asks for the tile that comes into the place of tile i − 1, of which all products are done, if that is free."""
    if LEAD < STAGES:
        bring(stream, L, ROWS, STAGES, walk, count, i + LEAD, batch)


@gluon.jit
def behind(stream, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, i,
           batch):
    """Asks for the tile that comes into the place of tile i, of which all products are done, unless `ahead` will."""
    if LEAD == STAGES:
        follow(stream, L, ROWS, i % STAGES, walk, count, i + STAGES, batch)


@triton.constexpr_function
def one_place_free(stages):
    """LEAD of a loop that asks ahead; where there is but one place, it cannot."""
    return max(stages - 1, 1)


@gluon.jit
def matrix(stream, i: gl.constexpr, stage, L: gl.constexpr, ROWS: gl.constexpr):
    """A stage of the i-th array as a matrix in shared memory; None for an array that is absent."""
    arrays, buffers, arrived = stream
    if arrays[i] is None:
        return None
    else:
        return buffers[i].index(stage).reshape([ROWS, tiles.padded(L[i].width)])


# Products. They run in the order in which they are queued, while the warps do something else.


@triton.constexpr_function
def products(*operands):
    """How many products are queued for these operands, given by their layouts, None for absent ones."""
    return sum(operand is not None for operand in operands)


@gluon.jit
def queue(left, right, zeros):
    """left · rightᵀ; None where one of them is absent. `zeros` gives the shape and the layout."""
    if left is None or right is None:
        return None
    else:
        return warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def accumulate(tile, right, acc, L: gl.constexpr, C: gl.constexpr):
    """acc + tile · right, of a tile in registers and rows of the layout L in shared memory."""
    left = gl.convert_layout(tile.to(right.dtype), left_operand(tiles.padded(L.width), C))
    return warpgroup_mma(left, right, acc, is_async=True)


@gluon.jit
def arrived(product, LATER: gl.constexpr):
    """A queued product once it is there, when the LATER ones queued after it may still run; None for None."""
    if product is None:
        return None
    else:
        return warpgroup_mma_wait(LATER, deps=[product])


@gluon.jit
def settled(first, second):
    """Two accumulated products, either of which may be None, once all that was queued is done."""
    if first is None:
        return None, warpgroup_mma_wait(0, deps=[second])
    elif second is None:
        return warpgroup_mma_wait(0, deps=[first]), None
    else:
        return warpgroup_mma_wait(0, deps=[first, second])


@gluon.jit
def nothing(array, L: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr):
    """Zeros to accumulate rows of an output in; None for an output that is not wanted."""
    if array is None:
        return None
    else:
        width: gl.constexpr = tiles.padded(L.width)
        return gl.zeros([ROWS, width], gl.float32, accumulator(width, C))


# Rows in memory, in the layout of a tile that was accumulated.


@gluon.jit
def store_rows(array, L: gl.constexpr, batch, head, start, length, ROWS: gl.constexpr, tile, C: gl.constexpr):
    """Writes the part of a tile that lies within `length` and the width, in the array's dtype."""
    pointers, inside = row_pointers(array, L, batch, head, start, length, ROWS, C)
    gl.store(pointers, tile.to(array.dtype.element_ty), mask=inside)


@gluon.jit
def load_rows(array, L: gl.constexpr, batch, head, start, length, ROWS: gl.constexpr, C: gl.constexpr):
    """Such rows, zero past `length` and the width."""
    pointers, inside = row_pointers(array, L, batch, head, start, length, ROWS, C)
    return gl.load(pointers, mask=inside, other=0.0)


@gluon.jit
def row_pointers(array, L: gl.constexpr, batch, head, start, length, ROWS: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = accumulator(tiles.padded(L.width), C)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, tiles.padded(L.width), gl.SliceLayout(0, layout))[None, :]
    first = array + tiles.first_element(L, batch, head, start, length)
    return first + (rows * (L.heads * L.width) + columns), (start + rows < length) & (columns < L.width)
