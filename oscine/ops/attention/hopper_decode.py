"""Decode attention on Hopper, in Gluon: one query per sequence, with the eight query heads of a key head side by side.

A program takes one sequence, one key head and one split of the context: every n-th page of n splits, up to a length
that is read at run time. splits.py gives the number of splits of each context. Pages of 64 keys and values arrive by
TMA in a ring of stages; keys are the 64-row operand of wgmma and query heads its 8 columns, then values (transposed)
and probabilities:

    before gdc_wait   the table, and the program's first pages but the sequence's last, which were there a step ago
    after it          the query and the last page, where this step's key and value are
    GROUP pages       s = K q;  m' = max(m, s);  p = 2^(s - m');  o = 2^(m - m') o + V^T p

So little work is left between the end of the projections and the result. With several splits the program that arrives
last adds them up, as in decode.py, where the softmax is defined.

Keys and values outside of the context or the window may be anything, NaN too: scores are masked, values zeroed.

Pages in FP8 (ops/kv/fp8.py) arrive as bytes, and their scales beside them. A page is expanded into a tile of bfloat16
when its turn comes. Scales are powers of two: those of keys are multiplied with s, those of values with p.

Shape suffixes: N keys of a page, M query heads of a key head, D head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.compat import async_load, barrier, reinterpret
from oscine.ops.record import record

PAGE = gl.constexpr(64)
HEAD_DIM = gl.constexpr(64)
HEADS = gl.constexpr(8)  # query heads of a key head
LOG2E = gl.constexpr(1.4426950408889634)
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
BYTE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
MAX_SEQUENCES = gl.constexpr(64)
# Numbers of programs, in 33rds of a wave (of those that run at once, RESIDENT). SMALL: few enough that the output
# projection's weights load beside them. FULL, the larger last: for steps of at least MIN_PAGES per program, if their
# programs fit one wave. MAX: if they do not, as a nearly empty second wave would read slowly.
SMALL, FULL, MAX = gl.constexpr(24), gl.constexpr((30, 32)), gl.constexpr(48)
MIN_PAGES = gl.constexpr(32)
LONG_SHARE = gl.constexpr(128)  # a long context has at least this share of all pages: 1 / LONG_SHARE
EXPONENTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@record
class Context:
    """The pages of one program: number i of them is `first + i * splits` of the sequence, in stage i % STAGES.

    Only in FP8: the exponents of stage i are in ring i of `exponents`, and page u of a group is expanded into tile u.
    """

    pages: tma.tensor_descriptor  # [pages, 2, key heads, PAGE, HEAD_DIM]
    scales: tma.tensor_descriptor  # the same pages, in boxes of the row after PAGE
    ring: gl.shared_memory_descriptor
    exponents: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor  # one mbarrier per stage
    table_ptr: gl.tensor
    head: gl.tensor
    first: gl.tensor  # page of the program
    last: gl.tensor  # page of the sequence
    start: gl.tensor  # key
    end: gl.tensor  # key
    splits: gl.tensor  # number of them, of the sequence
    STAGES: gl.constexpr
    FP8: gl.constexpr

    @gluon.jit
    def page(self, i):
        """The i-th of this program; 0 if there is none."""
        at = self.first + i * self.splits
        return gl.load(self.table_ptr + at, at <= self.last, other=0)

    @gluon.jit
    def expect(self, i):
        wanted = self.first + i * self.splits <= self.last
        size: gl.constexpr = self.pages.block_type.nbytes + (self.scales.block_type.nbytes if self.FP8 else 0)
        mbarrier.expect(self.arrived.index(i % self.STAGES), size, pred=wanted)

    @gluon.jit
    def fetch(self, i, page, wanted):
        stage = i % self.STAGES
        at = [page, 0, self.head, 0, 0]
        arrived = self.arrived.index(stage)
        async_load(self.pages, at, arrived, self.ring.index(stage), pred=wanted)
        if self.FP8:
            after = [page, 0, self.head, PAGE, 0]
            async_load(self.scales, after, arrived, self.exponents.index(stage), pred=wanted)

    @gluon.jit
    def expand(self, i, u):
        """In FP8: the i-th page, as the u-th of its group, for products to read. Through float16, as in
        ops/kv/triton.py."""
        both = reinterpret(self.ring.index(i % self.STAGES), gl.uint8, [2 * PAGE, HEAD_DIM], BYTE_TILE).load(BYTES)
        self.tiles.index(u).store(
            both.to(gl.float8e4nv, bitcast=True).to(gl.float16).to(gl.float32).to(self.tiles.dtype)
        )
        fence_async_shared()
        barrier()

    @gluon.jit
    def scales_of(self, i, kind: gl.constexpr, layout: gl.constexpr):
        """In FP8: of the keys (0) or the values (1) of the i-th page."""
        both = reinterpret(self.exponents.index(i % self.STAGES), gl.uint8, [2, PAGE], EXPONENTS)
        return (both.index(kind).load(layout).to(gl.int32) << 23).to(gl.float32, bitcast=True)

    @gluon.jit
    def keys_and_values(self, i, u):
        if self.FP8:
            both = self.tiles.index(u)
        else:
            both = reinterpret(self.ring.index(i % self.STAGES), self.pages.dtype, [2 * PAGE, HEAD_DIM], TILE)
        return both.slice(0, PAGE, dim=0), both.slice(PAGE, PAGE, dim=0)

    @gluon.jit
    def inside(self, i, layout: gl.constexpr):
        """Which keys of a page count."""
        key_N = (self.first + i * self.splits) * PAGE + gl.arange(0, PAGE, layout)
        return (key_N >= self.start) & (key_N < self.end)

    @gluon.jit
    def clear_outside(self, i, u):
        """Zeroes the values that do not count."""
        first_key = (self.first + i * self.splits) * PAGE
        if (first_key < self.start) | (first_key + PAGE > self.end):
            _, values = self.keys_and_values(i, u)
            inside_N = self.inside(i, gl.SliceLayout(1, VALUES))
            values.store(gl.where(inside_N[:, None], values.load(VALUES), 0.0))


@gluon.jit(do_not_specialize=["num_sequences"])
def decode_kernel(
    queries,
    pages,
    scales,
    out_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    partial_ptr,
    stats_ptr,
    arrivals_ptr,
    table_stride,
    num_sequences,
    scale,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    RESIDENT: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (KV_HEADS, num_sequences + MAX_PARTS - 1): the splits of all contexts, then programs without work.

    WINDOW 0 is full attention; scale includes log2(e). scales: None unless FP8.
    RESIDENT: programs that run at once on the GPU.
    """
    FP8: gl.constexpr = scales is not None
    gdc_launch_dependents()
    head, index = gl.program_id(0), gl.program_id(1)
    if MAX_PARTS == 1:
        sequence, split, splits = index, gl.to_tensor(0), gl.to_tensor(1)
    else:
        sequence, split, splits = _split_of(index, lens_ptr, num_sequences, RESIDENT, KV_HEADS, MAX_SPLITS)
        if sequence >= num_sequences:
            return
    ring = gl.allocate_shared_memory(pages.dtype, [STAGES] + pages.block_type.shape, pages.layout)  # noqa: RUF005
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if FP8:
        exponents = gl.allocate_shared_memory(scales.dtype, [STAGES] + scales.block_type.shape, scales.layout)  # noqa: RUF005
        tiles = gl.allocate_shared_memory(queries.dtype, [GROUP, 2 * PAGE, HEAD_DIM], TILE)
    else:
        scales, exponents, tiles = pages, ring, ring
    query = gl.allocate_shared_memory(queries.dtype, [HEADS, HEAD_DIM], queries.layout)
    query_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_tiles = gl.allocate_shared_memory(queries.dtype, [GROUP, HEADS, PAGE], TILE)
    mbarrier.init(query_arrived, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    end = gl.load(lens_ptr + sequence)
    start = gl.maximum(end - WINDOW, 0) if WINDOW else gl.to_tensor(0)
    last = (end - 1) // PAGE
    blocks = last - start // PAGE + 1
    table_ptr += sequence.to(gl.int64) * table_stride
    shared = (ring, exponents, tiles, arrived)
    first = start // PAGE + split
    context = Context(pages, scales, *shared, table_ptr, head, first, last, start, end, splits, STAGES, FP8)
    row_M = gl.arange(0, HEADS, gl.SliceLayout(0, ACCUMULATOR))
    sink_M = gl.load(sinks_ptr + head * HEADS + row_M).to(gl.float32) * LOG2E

    first_pages = ()
    for i in gl.static_range(STAGES):
        first_pages += (context.page(i),)
    newest = (last - context.first) // splits
    newest_is_due = (context.first + newest * splits == last) & (newest < STAGES)
    newest_page = context.page(newest)
    for i in gl.static_range(STAGES):
        context.expect(i)
        context.fetch(i, first_pages[i], context.first + i * splits < last)
    gdc_wait()
    mbarrier.expect(query_arrived, queries.block_type.nbytes)
    pair = sequence * KV_HEADS + head
    async_load(queries, [pair * HEADS, 0], query_arrived, query)
    context.fetch(newest, newest_page, newest_is_due)

    mine = gl.cdiv(blocks - split, splits)
    max_M, sum_M, out_DM = _attend(context, query, query_arrived, p_tiles, sink_M, mine, scale, GROUP)
    sum_M += gl.where(split == 0, gl.exp2(sink_M - max_M), 0.0)

    at_DM = row_M[None, :] * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(1, ACCUMULATOR))[:, None]
    result_ptrs = out_ptr + pair.to(gl.int64) * (HEADS * HEAD_DIM) + at_DM
    if splits == 1:
        gl.store(result_ptrs, (out_DM / sum_M[None, :]).to(out_ptr.dtype.element_ty))
    elif MAX_PARTS > 1:
        place = head * (num_sequences + MAX_PARTS - 1) + index
        stats_ptrs = stats_ptr + place * (2 * HEADS) + row_M
        partial_ptrs = partial_ptr + place.to(gl.int64) * (HEADS * HEAD_DIM) + at_DM
        gl.store(stats_ptrs, max_M)
        gl.store(stats_ptrs + HEADS, sum_M)
        gl.store(partial_ptrs, out_DM)
        # Every thread's part must be written before the one thread that counts says so.
        barrier()
        if gl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == splits - 1:
            gl.store(arrivals_ptr + pair, 0)
            stats_ptrs += -split * (2 * HEADS)
            partial_ptrs += -split * (HEADS * HEAD_DIM)
            total_DM = _combine(partial_ptrs, stats_ptrs, splits, MAX_SPLITS)
            gl.store(result_ptrs, total_DM.to(out_ptr.dtype.element_ty))


@gluon.jit
def _split_of(index, lens_ptr, num_sequences, RESIDENT: gl.constexpr, KV_HEADS: gl.constexpr, MAX_SPLITS: gl.constexpr):
    """As splits.split_of, with the number of parts that _parts_of chooses.

    Past the last split, the sequence is num_sequences or more. Each warp computes it alone: two sequences per lane.
    """
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0]))
    sequence_S = gl.arange(0, MAX_SEQUENCES, layout)
    real_S = sequence_S < num_sequences
    len_S = gl.load(lens_ptr + sequence_S, real_S, other=0)
    blocks_S = gl.where(real_S, gl.maximum((len_S + PAGE - 1) // PAGE, 1), 0)
    total = gl.sum(blocks_S, 0)
    parts = _parts_of(blocks_S, total, RESIDENT, KV_HEADS, MAX_SPLITS)
    splits_S = _splits_of(blocks_S, total, parts, MAX_SPLITS)
    end_S = gl.convert_layout(gl.associative_scan(splits_S[None, :], 1, _add).reshape([MAX_SEQUENCES]), layout)
    mine_S = (end_S > index) & (end_S - splits_S <= index)
    sequence = gl.sum((end_S <= index).to(gl.int32), 0)
    first = gl.sum(gl.where(mine_S, end_S - splits_S, 0), 0)
    splits = gl.sum(gl.where(mine_S, splits_S, 0), 0)
    return sequence, index - first, splits


@gluon.constexpr_function
def parts_of(share: int, resident: int, kv_heads: int) -> int:
    """The number of parts with which a step has that share of a wave."""
    return resident * share // 33 // kv_heads


@gluon.jit
def _parts_of(blocks_S, total, RESIDENT: gl.constexpr, KV_HEADS: gl.constexpr, MAX_SPLITS: gl.constexpr):
    """The number of parts.

    With fewer than MIN_PAGES per program, that of SMALL. Otherwise that of the largest of FULL with which the programs
    of all long contexts fit one wave. If none does, that of MAX.
    """
    parts = gl.to_tensor(parts_of(SMALL, RESIDENT, KV_HEADS))
    if total >= parts_of(FULL[len(FULL) - 1], RESIDENT, KV_HEADS) * MIN_PAGES:
        parts = gl.to_tensor(parts_of(MAX, RESIDENT, KV_HEADS))
        for i in gl.static_range(len(FULL)):
            splits_S = _splits_of(blocks_S, total, parts_of(FULL[i], RESIDENT, KV_HEADS), MAX_SPLITS)
            long = gl.sum(gl.where(blocks_S * LONG_SHARE >= total, splits_S, 0), 0)
            parts = gl.where(long * KV_HEADS <= RESIDENT, parts_of(FULL[i], RESIDENT, KV_HEADS), parts)
    return parts


@gluon.jit
def _splits_of(blocks_S, total, parts, MAX_SPLITS: gl.constexpr):
    """The number of splits of each context, by the formula of splits.py."""
    return gl.minimum(gl.cdiv(blocks_S * parts, total), gl.minimum(blocks_S, MAX_SPLITS))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _attend(context, query, query_arrived, p_tiles, sink_M, mine, scale, GROUP: gl.constexpr):
    """(maximum, sum of p, sum of p v) over the `mine` pages of a program, the maximum no less than the sink's."""
    rows: gl.constexpr = gl.SliceLayout(1, ACCUMULATOR)
    max_M = sink_M
    zeros = gl.zeros([PAGE, HEADS], gl.float32, ACCUMULATOR)
    sum_NM = zeros
    out_DM = zeros
    mbarrier.wait(query_arrived, 0)
    for begin in range(0, mine, GROUP):
        scores = ()
        for u in gl.static_range(GROUP):
            i = _page_or(begin, u, mine)
            mbarrier.wait(context.arrived.index(i % context.STAGES), (i // context.STAGES) & 1)
            if context.FP8:
                context.expand(i, u)
            keys, _ = context.keys_and_values(i, u)
            scores += (warpgroup_mma(keys, query.permute((1, 0)), zeros, use_acc=False, is_async=True),)
        for u in gl.static_range(GROUP):
            context.clear_outside(_page_or(begin, u, mine), u)
        scores = warpgroup_mma_wait(0, deps=scores)
        masked = ()
        top_NM = gl.full([PAGE, HEADS], float("-inf"), gl.float32, ACCUMULATOR)
        for u in gl.static_range(GROUP):
            inside_N = context.inside(begin + u, rows) & (begin + u < mine)
            score_NM = (scores[u] if GROUP > 1 else scores) * scale
            if context.FP8:
                score_NM *= context.scales_of(_page_or(begin, u, mine), 0, rows)[:, None]
            masked += (gl.where(inside_N[:, None], score_NM, float("-inf")),)
            top_NM = gl.maximum(top_NM, masked[u])
        new_max_M = gl.maximum(max_M, gl.max(top_NM, 0))
        rescale_M = gl.exp2(max_M - new_max_M)
        max_M = new_max_M
        sum_NM *= rescale_M[None, :]
        out_DM *= rescale_M[None, :]
        for u in gl.static_range(GROUP):
            p_NM = gl.exp2(masked[u] - max_M[None, :])
            sum_NM += p_NM
            if context.FP8:
                inside_N = context.inside(begin + u, rows) & (begin + u < mine)
                p_NM *= gl.where(inside_N, context.scales_of(_page_or(begin, u, mine), 1, rows), 0.0)[:, None]
            p_tiles.index(u).permute((1, 0)).store(p_NM.to(p_tiles.dtype))
        fence_async_shared()
        barrier()
        for u in gl.static_range(GROUP):
            _, values = context.keys_and_values(_page_or(begin, u, mine), u)
            p_tile = p_tiles.index(u).permute((1, 0))
            out_DM = warpgroup_mma(values.permute((1, 0)), p_tile, out_DM, is_async=True)
        out_DM = warpgroup_mma_wait(0, deps=[out_DM])
        for u in gl.static_range(GROUP):
            i = begin + u + context.STAGES
            if i < mine:
                context.expect(i)
                context.fetch(i, context.page(i), True)
    return max_M, gl.sum(sum_NM, 0), out_DM


@gluon.jit
def _page_or(begin, u, mine):
    """The u-th page of a group; past the program's last the first one again, whose scores are masked then."""
    return gl.where(begin + u < mine, begin + u, begin)


@gluon.jit
def _combine(partial_ptrs, stats_ptrs, num_splits, MAX_SPLITS: gl.constexpr):
    """The results of the first `num_splits` programs of a sequence and key head, each relative to its own maximum.

    Other programs wrote these: read from the L2, where a line of the L1 could be stale.
    """
    BATCH: gl.constexpr = 8  # whose loads overlap
    max_M = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, ACCUMULATOR))
    sum_M = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, ACCUMULATOR))
    out_DM = gl.zeros([HEAD_DIM, HEADS], gl.float32, ACCUMULATOR)
    for first in gl.static_range(0, MAX_SPLITS, BATCH):
        if first < num_splits:
            maxima, sums, parts = (), (), ()
            for c in gl.static_range(first, min(first + BATCH, MAX_SPLITS)):
                wanted = c < num_splits
                stat_ptrs = stats_ptrs + c * (2 * HEADS)
                maxima += (gl.load(stat_ptrs, wanted, other=float("-inf"), cache_modifier=".cg"),)
                sums += (gl.load(stat_ptrs + HEADS, wanted, other=0.0, cache_modifier=".cg"),)
                part_ptrs = partial_ptrs + c * (HEADS * HEAD_DIM)
                parts += (gl.load(part_ptrs, wanted, other=0.0, cache_modifier=".cg"),)
            new_max_M = max_M
            for c in gl.static_range(len(maxima)):
                new_max_M = gl.maximum(new_max_M, maxima[c])
            rescale_M = gl.exp2(max_M - new_max_M)
            sum_M *= rescale_M
            out_DM *= rescale_M[None, :]
            for c in gl.static_range(len(maxima)):
                weight_M = gl.exp2(maxima[c] - new_max_M)
                sum_M += weight_M * sums[c]
                out_DM += weight_M[None, :] * parts[c]
            max_M = new_max_M
    return out_DM / sum_M[None, :]
