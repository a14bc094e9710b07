"""Numbers, one a row, that go with the tiles of a stream: log-sum-exps and the like.

Where rows lie across a tile of scores, a thread needs many of these: read from memory they would keep it waiting,
and read early they would fill its registers. So threads copy them to shared memory ahead, each a few, in step with
the stages of the stream, and all arrive on a barrier of the stage.

They are (arrays, buffers, arrived) as a stream is, of float32 arrays `[batch, heads, length]`, None for one that is
absent; `start`, `arrive`, `ahead` and `behind` are those of a stream. The bandwidth of shared memory goes to products
where some are on their way, so what is needed first is better read before these are queued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jttt.kernels import schedule, tiles
from jttt.kernels.hopper import stream


@gluon.jit
def make(arrays, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Numbers of which none are on their way yet."""
    buffers = ()
    for i in gl.static_range(len(arrays)):
        if arrays[i] is None:
            buffers += (0, )
        else:
            buffers += (gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])), )
    return arrays, buffers, stream.barriers(STAGES, 32 * gl.num_warps())


@gluon.jit
def bring(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, walk, count, i, batch, length):
    """Sets those of tile i of a walk of `count` tiles on their way, if there is one; zeros past `length`."""
    arrays, buffers, arrived = numbers
    if i < count:
        stage = i % STAGES
        block, head = schedule.visited(walk, i)
        rows = block * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        for array in gl.static_range(len(arrays)):
            if arrays[array] is not None:
                pointers = tiles.column_pointers(arrays[array], L[array], batch, head, length, rows)
                async_copy.async_load(buffers[array].index(stage), pointers, mask=rows < length)
        async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)


@gluon.jit
def start(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, batch,
          length):
    for i in gl.static_range(LEAD):
        bring(numbers, L, ROWS, STAGES, walk, count, i, batch, length)


@gluon.jit
def arrive(numbers, STAGES: gl.constexpr, i):
    arrays, buffers, arrived = numbers
    mbarrier.wait(arrived.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def ahead(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, i, batch,
          length):
    if LEAD < STAGES:
        bring(numbers, L, ROWS, STAGES, walk, count, i + LEAD, batch, length)


@gluon.jit
def behind(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, walk, count, i,
           batch, length):
    if LEAD == STAGES:
        bring(numbers, L, ROWS, STAGES, walk, count, i + STAGES, batch, length)


@gluon.jit
def across(numbers, i: gl.constexpr, stage, LAYOUT: gl.constexpr):
    """A stage of the i-th array, `[1, rows]`; None for an array that is absent."""
    arrays, buffers, arrived = numbers
    if arrays[i] is None:
        return None
    else:
        return buffers[i].index(stage).load(LAYOUT)[None, :]
