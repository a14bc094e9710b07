"""Numbers, one a row, that go with the tiles of a stream: log-sum-exps and the like.

Where rows lie across a tile of scores, a thread needs many of these: read from memory they would keep it waiting,
and read early they would fill its registers. So threads copy them to shared memory ahead, each a few, in step with
the stages of the stream, and all arrive on a barrier of the stage.

They are (arrays, buffers, arrived) as a stream is, of float32 arrays `[batch, heads, length]`, None for one that is
absent, and are used as a stream is. The bandwidth of shared memory goes to products where some are on their way,
so what these wait for is better read before they are queued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jttt.kernels import tiles
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
def ask(numbers, L: gl.constexpr, ROWS: gl.constexpr, stage, batch, head, first, length, wanted):
    """Sets rows from `first` on their way, zeros past `length`, if they are wanted."""
    arrays, buffers, arrived = numbers
    if wanted:
        rows = first + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        for i in gl.static_range(len(arrays)):
            if arrays[i] is not None:
                pointers = tiles.column_pointers(arrays[i], L[i], batch, head, length, rows)
                async_copy.async_load(buffers[i].index(stage), pointers, mask=rows < length)
        async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)


@gluon.jit
def start(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, walk, count, turn, batch, head, length):
    """Sets those of the first tiles of a walk of `count` tiles on their way, from the stage of `turn` on."""
    for i in gl.static_range(STAGES):
        first = tiles.visited(walk, i) * ROWS
        ask(numbers, L, ROWS, (turn + i) % STAGES, batch, head, first, length, i < count)


@gluon.jit
def arrive(numbers, STAGES: gl.constexpr, i, turn):
    """Waits for those of tile i of the walk that began in `turn`."""
    arrays, buffers, arrived = numbers
    mbarrier.wait(arrived.index((turn + i) % STAGES), ((turn + i) // STAGES) & 1)


@gluon.jit
def refill(numbers, L: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, walk, count, i, turn, batch, head,
           length):
    """Asks for what comes into the place of tile i, which nothing reads any more."""
    first = tiles.visited(walk, i + STAGES) * ROWS
    ask(numbers, L, ROWS, (turn + i) % STAGES, batch, head, first, length, i + STAGES < count)


@gluon.jit
def across(numbers, i: gl.constexpr, stage, LAYOUT: gl.constexpr):
    """A stage of the i-th array, `[1, rows]`; None for an array that is absent."""
    arrays, buffers, arrived = numbers
    if arrays[i] is None:
        return None
    else:
        return buffers[i].index(stage).load(LAYOUT)[None, :]
