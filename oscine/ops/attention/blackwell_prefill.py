"""Prefill attention for compute capability 10.x, in Gluon: chunks of any length over a paged context.

Definition: reference.py. A tile is TOKENS tokens of a sequence for each of two groups of four warps, times the eight
query heads of one key head: 128 rows for each group, a thread for each row. Programs stay on their SM and take every
num_programs-th tile. A block is a page.

    loads:    wait empty[s]  ->  TMA keys, values of a block  ->  full[s]
    products: wait full[s], loaded[c]  ->  s[c] = q k  ->  scored[c];   wait weighted[c]  ->  o[c] = p v  ->  summed[c];
              after both groups empty[s]
    softmax:  wait scored[c]  ->  s to registers, loaded[c]  ->  p = 2^(s - max)  ->  wait summed[c], add o  ->
              p to tensor memory, weighted[c]

The scores of the next block are multiplied before the values of this one, so the tensor cores work while a group
computes exponentials, and one group computes while the other waits. Sums over blocks are in registers: each product
with values starts anew, so nothing in tensor memory is ever rescaled.

Keys and values outside of the context may be anything, NaN too: scores are masked, values zeroed. Pages past the
context are not read.

Shape suffixes: M rows of a group, N keys of a block, D head dimension, S sequences.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.attention.hopper_decode import HEAD_DIM, HEADS, LOG2E, PAGE, TILE
from oscine.ops.attention.hopper_prefill import SCALE, find_sequence
from oscine.ops.barriers import barriers
from oscine.ops.compat import async_load, barrier, reinterpret
from oscine.ops.record import record

ROWS = gl.constexpr(128)  # of a group: what an instruction multiplies
TOKENS = gl.constexpr(16)  # of a group
GROUPS = gl.constexpr(2)
# registers per thread: at the launch all warps have the same number, then loads and products leave most to the groups
LAUNCH_REGISTERS, GROUP_REGISTERS, LOAD_REGISTERS = gl.constexpr(168), gl.constexpr(224), gl.constexpr(48)
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of a block, to zero some


@record
class Config:
    STAGES: gl.constexpr
    WINDOW: gl.constexpr
    KV_HEADS: gl.constexpr


@record
class Tiles:
    """The tiles of sequences first_sequence .. num_sequences - 1. Each sequence starts a new tile."""

    starts: gl.tensor
    lens: gl.tensor
    first_sequence: gl.tensor
    num_sequences: gl.tensor
    last: gl.tensor  # tile of the last key head; programs go down from it, as late tiles attend to the most keys


@record
class Buffers:
    """Shared and tensor memory, and their barriers."""

    queries: gl.shared_memory_descriptor  # [GROUPS, ROWS, HEAD_DIM]
    ring: gl.shared_memory_descriptor  # [STAGES * 2, PAGE, HEAD_DIM]: keys, then values of a stage
    scores: tensor_memory_descriptor  # [GROUPS, ROWS, PAGE] float32
    weights: tensor_memory_descriptor  # [GROUPS, ROWS, PAGE] bfloat16: p
    sums: tensor_memory_descriptor  # [GROUPS, ROWS, HEAD_DIM] float32: p v of one block
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor  # the scores are in registers; at first, the queries are there
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor


@gluon.jit
def _find(cfg, tiles, index):
    """Of a tile: its sequence, key head, first token, first position, tokens left in the sequence, context, first key,
    and its blocks; 0 if it is empty.
    """
    tile, head = index // cfg.KV_HEADS, index % cfg.KV_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    sequence, token, stop, end = find_sequence(
        tiles.starts, tiles.lens, tile, tiles.first_sequence, tiles.num_sequences, TOKENS * GROUPS, layout
    )
    query = end - (stop - token)
    first = gl.maximum(query - (cfg.WINDOW - 1), 0) // PAGE * PAGE if cfg.WINDOW else 0
    last = gl.maximum(gl.minimum(query + TOKENS * GROUPS, end) - 1, 0)
    blocks = gl.where(token < stop, (last - first) // PAGE + 1, 0)
    return sequence, head, token, query, stop - token, end, first, blocks


@gluon.jit
def _load(cfg, tiles, buffers, pages, table_ptr, table_stride):
    boxes = reinterpret(buffers.ring, pages.dtype, [cfg.STAGES * 2, 1, 1, 1, PAGE, HEAD_DIM], pages.layout)
    at = 0  # blocks so far
    for index in range(tiles.last - gl.program_id(0), -1, -gl.num_programs(0)):
        sequence, head, _, _, _, _, first, blocks = _find(cfg, tiles, index)
        row_ptr = table_ptr + sequence.to(gl.int64) * table_stride
        for i in range(blocks):
            page = gl.load(row_ptr + first // PAGE + i)
            stage = at % cfg.STAGES
            mbarrier.wait(buffers.empty.index(stage), ((at // cfg.STAGES) & 1) ^ 1)
            full = buffers.full.index(stage)
            mbarrier.expect(full, 2 * pages.block_type.nbytes)
            for kind in gl.static_range(2):
                async_load(pages, [page, kind, head, 0, 0], full, boxes.index(stage * 2 + kind))
            at += 1


@gluon.jit
def _score(cfg, buffers, at, parity):
    """Starts the scores of block `at` for both groups, when these have the ones before in registers."""
    stage = at % cfg.STAGES
    mbarrier.wait(buffers.full.index(stage), (at // cfg.STAGES) & 1)
    keys = buffers.ring.index(stage * 2).permute((1, 0))
    for c in gl.static_range(GROUPS):
        mbarrier.wait(buffers.loaded.index(c), parity)
        tcgen05_mma(buffers.queries.index(c), keys, buffers.scores.index(c), use_acc=False)
        tcgen05_commit(buffers.scored.index(c))


@gluon.jit
def _multiply(cfg, tiles, buffers):
    at = 0  # blocks so far
    loads = 0  # phases of the barriers `loaded` that were waited for
    for index in range(tiles.last - gl.program_id(0), -1, -gl.num_programs(0)):
        _, _, _, _, _, _, _, blocks = _find(cfg, tiles, index)
        if blocks > 0:
            _score(cfg, buffers, at, loads & 1)
            loads += 1
        for i in range(blocks):
            if i + 1 < blocks:
                _score(cfg, buffers, at + 1, loads & 1)
                loads += 1
            stage = at % cfg.STAGES
            for c in gl.static_range(GROUPS):
                mbarrier.wait(buffers.weighted.index(c), at & 1)
                values = buffers.ring.index(stage * 2 + 1)
                tcgen05_mma(buffers.weights.index(c), values, buffers.sums.index(c), use_acc=False)
                tcgen05_commit(buffers.summed.index(c))
            tcgen05_commit(buffers.empty.index(stage))
            at += 1


@gluon.jit
def _attend(c: gl.constexpr, cfg, tiles, buffers, out_ptr, q_ptr, q_stride, cos_sin_ptr, sinks_ptr):
    """One of the groups: `c` says which tokens of each tile are its own."""
    scores, weights, sums = buffers.scores.index(c), buffers.weights.index(c), buffers.sums.index(c)
    row_M = gl.arange(0, ROWS, gl.SliceLayout(1, scores.get_reg_layout()))
    column_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, sums.get_reg_layout()))
    at = 0  # blocks so far
    for index in range(tiles.last - gl.program_id(0), -1, -gl.num_programs(0)):
        _, head, token, first_query, count, end, first, blocks = _find(cfg, tiles, index)
        if blocks > 0:
            token_M = c * TOKENS + row_M // HEADS
            head_M = head * HEADS + row_M % HEADS
            query_M = first_query + token_M
            q_M = (token + token_M).to(gl.int64) * q_stride + head_M * HEAD_DIM
            _put_queries(buffers.queries.index(c), q_ptr, q_M, token_M < count, cos_sin_ptr, query_M)
            mbarrier.arrive(buffers.loaded.index(c), count=1)
            max_M = gl.load(sinks_ptr + head_M).to(gl.float32) * LOG2E
            sum_M = gl.full([ROWS], 1.0, gl.float32, max_M.type.layout)
            rescale_M = sum_M
            out_MD = gl.zeros([ROWS, HEAD_DIM], gl.float32, sums.get_reg_layout())
            for i in range(blocks):
                key = first + i * PAGE
                if (end - key < PAGE) & (c == 0):  # for both
                    _clear_from(cfg, buffers, at, end - key)
                mbarrier.wait(buffers.scored.index(c), at & 1)
                score_MN = scores.load()
                if i + 1 < blocks:
                    mbarrier.arrive(buffers.loaded.index(c), count=1)
                if (key + PAGE > first_query + c * TOKENS + 1) | (cfg.WINDOW > 0):
                    score_MN = _masked(cfg, score_MN, query_M - key)
                new_max_M = gl.maximum(max_M, gl.max(score_MN, 1) * SCALE)
                p_MN = gl.exp2(score_MN * SCALE - new_max_M[:, None])
                new_rescale_M = gl.exp2(max_M - new_max_M)
                sum_M = sum_M * new_rescale_M + gl.sum(p_MN, 1)
                p_MN = p_MN.to(weights.dtype)
                if i > 0:
                    mbarrier.wait(buffers.summed.index(c), (at & 1) ^ 1)
                    out_MD = out_MD * _by_row(rescale_M, out_MD) + sums.load()
                weights.store(p_MN)
                mbarrier.arrive(buffers.weighted.index(c), count=1)
                max_M, rescale_M = new_max_M, new_rescale_M
                at += 1
            mbarrier.wait(buffers.summed.index(c), (at & 1) ^ 1)
            out_MD = (out_MD * _by_row(rescale_M, out_MD) + sums.load()) * _by_row(1.0 / sum_M, out_MD)
            out_M = (token + token_M).to(gl.int64) * (cfg.KV_HEADS * HEADS) + head_M
            out_ptrs = out_ptr + _by_row(out_M * HEAD_DIM, out_MD) + column_D[None, :]
            gl.store(out_ptrs, out_MD.to(out_ptr.dtype.element_ty), _by_row(token_M < count, out_MD))


@gluon.jit
def _by_row(x_M, like):
    """[M, 1]: x_M for the rows of another tensor, which the same threads have."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _put_queries(tile, q_ptr, at_M, real_M, cos_sin_ptr, position_M):
    """Queries of a group, from elements `at` on, into shared memory. They are rotated if there are angles."""
    half: gl.constexpr = HEAD_DIM // 2
    layout: gl.constexpr = gl.BlockedLayout([1, half], [32, 1], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    at_M, real_M = gl.convert_layout(at_M, rows), gl.convert_layout(real_M, rows)
    column_D = gl.arange(0, half, gl.SliceLayout(0, layout))
    at_MD = at_M[:, None] + column_D[None, :]
    first = gl.load(q_ptr + at_MD, real_M[:, None], other=0)
    second = gl.load(q_ptr + half + at_MD, real_M[:, None], other=0)
    if cos_sin_ptr is not None:
        position_M = gl.convert_layout(position_M, rows)
        angle_MD = position_M[:, None] * HEAD_DIM + column_D[None, :]
        real_M &= position_M >= 0  # padding before a sequence has none
        cos = gl.load(cos_sin_ptr + angle_MD, real_M[:, None], other=0)
        sin = gl.load(cos_sin_ptr + half + angle_MD, real_M[:, None], other=0)
        wide_first, wide_second = first.to(gl.float32), second.to(gl.float32)
        first = (wide_first * cos - wide_second * sin).to(tile.dtype)
        second = (wide_second * cos + wide_first * sin).to(tile.dtype)
    tile.store(gl.reshape(gl.permute(gl.join(first, second), [0, 2, 1]), [ROWS, HEAD_DIM]))
    fence_async_shared()
    barrier()


@gluon.jit
def _clear_from(cfg, buffers, at, inside):
    """Zeroes the values of a block after the first `inside`, before any group multiplies them."""
    stage = at % cfg.STAGES
    mbarrier.wait(buffers.full.index(stage), (at // cfg.STAGES) & 1)
    values = buffers.ring.index(stage * 2 + 1)
    key_N = gl.arange(0, PAGE, gl.SliceLayout(1, VALUES))
    values.store(gl.where((key_N < inside)[:, None], values.load(VALUES), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _masked(cfg, score_MN, limit_M):
    """-inf for the keys of a block that a row must not see; limit_M: its query, counted from the block's first key."""
    key_N = gl.arange(0, PAGE, gl.SliceLayout(0, score_MN.type.layout))
    visible_MN = key_N[None, :] <= limit_M[:, None]
    if cfg.WINDOW:
        visible_MN &= key_N[None, :] > (limit_M - cfg.WINDOW)[:, None]
    return gl.where(visible_MN, score_MN, float("-inf"))


@gluon.jit(do_not_specialize=["table_stride", "first_sequence", "num_sequences", "num_tokens"])
def prefill_kernel(
    pages,
    out_ptr,
    q_ptr,
    q_stride,
    cos_sin_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    counts_ptr,
    sinks_ptr,
    table_stride,
    first_sequence,
    num_sequences,
    num_tokens,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Writes out [tokens, KV_HEADS * HEADS, HEAD_DIM] bfloat16, for the sequences from first_sequence on. Any grid.

    q bfloat16, q_stride elements from token to token. cos_sin: float32 [positions, HEAD_DIM], cosines then sines, or
    None if queries are rotated already. counts: of Batch, or None; then they are first_sequence and num_sequences.
    pages: a descriptor of [pages, 2, KV_HEADS, PAGE, HEAD_DIM] bfloat16. WINDOW 0 is full attention.
    """
    gdc_launch_dependents()
    cfg = Config(STAGES, WINDOW, KV_HEADS)
    score_layout: gl.constexpr = TensorMemoryLayout([ROWS, PAGE], col_stride=1)
    sum_layout: gl.constexpr = TensorMemoryLayout([ROWS, HEAD_DIM], col_stride=1)
    buffers = Buffers(
        gl.allocate_shared_memory(pages.dtype, [GROUPS, ROWS, HEAD_DIM], TILE),
        gl.allocate_shared_memory(pages.dtype, [STAGES * 2, PAGE, HEAD_DIM], TILE),
        allocate_tensor_memory(gl.float32, [GROUPS, ROWS, PAGE], score_layout),
        allocate_tensor_memory(pages.dtype, [GROUPS, ROWS, PAGE], score_layout),
        allocate_tensor_memory(gl.float32, [GROUPS, ROWS, HEAD_DIM], sum_layout),
        barriers(STAGES),
        barriers(STAGES),
        barriers(GROUPS),
        barriers(GROUPS),
        barriers(GROUPS),
        barriers(GROUPS),
    )
    gdc_wait()
    if counts_ptr is not None:
        first_sequence = gl.load(counts_ptr)
        num_sequences = gl.load(counts_ptr + 1)
    num_tiles = (num_tokens - first_sequence) // (TOKENS * GROUPS) + (num_sequences - first_sequence)
    tiles = Tiles(starts_ptr, lens_ptr, first_sequence, num_sequences, num_tiles * KV_HEADS - 1)
    gl.warp_specialize(
        [
            (_attend, (0, cfg, tiles, buffers, out_ptr, q_ptr, q_stride, cos_sin_ptr, sinks_ptr)),
            (_attend, (1, cfg, tiles, buffers, out_ptr, q_ptr, q_stride, cos_sin_ptr, sinks_ptr)),
            (_load, (cfg, tiles, buffers, pages, table_ptr, table_stride)),
            (_multiply, (cfg, tiles, buffers)),
        ],
        [4, 1, 1],
        [GROUP_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )
