"""Prefill attention on Hopper, in Gluon: chunks of any length over a paged context, as prefill.py defines them.

A tile is some tokens of one sequence times the eight query heads of one key head. Programs stay on their SM and take
one tile after the other. In each, one warp brings queries and pages by TMA through a ring of blocks of BLOCK keys, and
CONSUMERS warpgroups compute 64 rows each, which are 8 tokens:

    producer: find the tile's sequence -> queries -> wait empty[s]  ->  keys, values of a block  ->  full[s]
    consumer: wait full[s]  ->  s = q k, while the block before does o = o + p v  ->  p = 2^(s - max)  ->  empty[s]

A consumer issues the next block's scores before the last block's values, so the tensor cores work while it computes
exponentials. Blocks go from the newest keys to the oldest: only the first ones need a mask, except in a window.

Few tokens make few tiles, and these would leave processors idle while one program reads a long context. So programs
share the blocks of a tile: each leaves its sums in memory, and the one that arrives last adds them up, as in decode.py.

Keys and values outside of the context may be anything, NaN too: scores are masked, values zeroed. Pages past the
context are not read; TMA gives zeros for page -1.

Shape suffixes: M rows of a consumer, N keys of a block, D head dimension, S sequences.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.attention.hopper_decode import HEAD_DIM, HEADS, LOG2E, PAGE, TILE, VALUES
from oscine.ops.compat import async_load, barrier, reinterpret
from oscine.ops.record import record
from oscine.ops.tile_scheduler import next_tile

# Of the scores, for exponentials in base 2. An argument would take a register of every consumer.
SCALE = gl.constexpr(1.4426950408889634 / 64**0.5)
ROWS = gl.constexpr(64)  # of a consumer
TOKENS = gl.constexpr(8)  # of a consumer
CONSUMERS = gl.constexpr(3)  # that share what the producer brings
# of a thread: launched with as many as all can have, then the producer leaves most of its own to the consumers
LAUNCH_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(128), gl.constexpr(160), gl.constexpr(32)
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALVES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # a thread has both numbers of a rotation
ANGLES = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
SCALAR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SLOTS = gl.constexpr(2)  # tiles whose queries are there, or on their way
# Where programs share contexts. Parts per program, at most: one if there are two programs per tile and key head. Blocks
# of a part, at least. What each consumer leaves of it, in elements: sums of p v [ROWS, HEAD_DIM], maxima [ROWS], and
# sums of p [ROWS].
ROUNDS, FEWEST_BLOCKS, SUMS_SIZE = gl.constexpr(4), gl.constexpr(16), gl.constexpr(64 * (64 + 2))
# Fields of a tile: key head, first token, tokens left in the sequence, their first position, context. Where programs
# share it: the newest and the oldest block of a part, its number, how many there are, and where their sums begin.
HEAD, TOKEN, COUNT, QUERY, END, NEWEST, OLDEST, PART, PARTS, SUMS, FIELDS = (gl.constexpr(i) for i in range(11))


@record
class Config:
    BLOCK: gl.constexpr  # keys
    STAGES: gl.constexpr
    WINDOW: gl.constexpr
    KV_HEADS: gl.constexpr
    SHARES: gl.constexpr  # programs at most that share a tile


@record
class Shared:
    queries: gl.shared_memory_descriptor  # [SLOTS * CONSUMERS, ROWS, HEAD_DIM]; results, too
    angles: gl.shared_memory_descriptor  # [SLOTS * CONSUMERS * 2, TOKENS, HEAD_DIM / 2]: cosines, then sines
    ring: gl.shared_memory_descriptor  # [STAGES * 2, BLOCK, HEAD_DIM]: keys, then values of a stage
    fields: gl.shared_memory_descriptor  # [SLOTS * FIELDS, 1]: of each tile
    queries_full: gl.shared_memory_descriptor
    queries_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, slot, field: gl.constexpr, value):
        """Writes a field of the tile in a slot; the producer does."""
        self.fields.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, SEQUENCES))

    @gluon.jit
    def get(self, slot, field: gl.constexpr):
        """Reads a field of the tile in a slot; the consumers do."""
        return gl.max(self.fields.index(slot * FIELDS + field).load(SCALAR), 0)


@gluon.constexpr_function
def score_layout(keys):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])


@gluon.jit
def _first_key(cfg, query):
    """The first key of the blocks that queries from this one on read."""
    return gl.maximum(query - (cfg.WINDOW - 1), 0) // PAGE * PAGE if cfg.WINDOW else 0


@gluon.jit
def find_sequence(
    starts_ptr, lens_ptr, tile, first_sequence, num_sequences, tokens: gl.constexpr, layout: gl.constexpr
):
    """The sequence that tile belongs to, the tile's first token, the token after the sequence's last, its context.

    Sequence i of those after the decodes may own tiles starts[i] // tokens + i and on; those past its end are empty.
    `layout`: of 32 sequences.
    """
    origin = gl.load(starts_ptr + first_sequence)
    sequence, token, stop, context = 0, 0, 0, 0
    for block in range(first_sequence, num_sequences, 32):
        sequence_S = block + gl.arange(0, 32, layout)
        inside_S = sequence_S < num_sequences
        start_S = gl.load(starts_ptr + sequence_S, inside_S, other=0)
        stop_S = gl.load(starts_ptr + sequence_S + 1, inside_S, other=0)
        context_S = gl.load(lens_ptr + sequence_S, inside_S, other=0)
        first_S = (start_S - origin) // tokens + (sequence_S - first_sequence)
        next_S = (stop_S - origin) // tokens + (sequence_S - first_sequence) + 1
        owner_S = inside_S & (first_S <= tile) & (tile < next_S)  # true of one sequence
        sequence += gl.sum(gl.where(owner_S, sequence_S, 0), 0)
        token += gl.sum(gl.where(owner_S, start_S + (tile - first_S) * tokens, 0), 0)
        stop += gl.sum(gl.where(owner_S, stop_S, 0), 0)
        context += gl.sum(gl.where(owner_S, context_S, 0), 0)
    return sequence, token, stop, context


@gluon.jit
def _produce(
    cfg, shared, queries, angles, pages, table_ptr, starts_ptr, lens_ptr, counts_ptr, counter_ptr, table_stride,
    first_sequence, num_sequences, num_tokens,
):  # fmt: skip
    gdc_wait()
    if counts_ptr is not None:
        first_sequence = gl.load(counts_ptr)
        num_sequences = gl.load(counts_ptr + 1)
    # A bound that needs nothing but sizes: each sequence may begin a tile.
    num_tiles = (num_tokens - first_sequence) // (TOKENS * CONSUMERS) + (num_sequences - first_sequence)
    pairs = num_tiles * cfg.KV_HEADS
    parts = gl.num_programs(0) if pairs * 2 <= gl.num_programs(0) else ROUNDS * gl.num_programs(0)
    shares = gl.maximum(gl.minimum(parts // gl.maximum(pairs, 1), cfg.SHARES), 1)
    at = 0  # blocks so far
    number = 0  # tiles so far
    index = gl.program_id(0)
    while index < pairs * shares:
        following = next_tile(counter_ptr)
        pair = index // shares
        tile, head = num_tiles + ~(pair // cfg.KV_HEADS), pair % cfg.KV_HEADS
        sequence, token, stop, end = find_sequence(
            starts_ptr, lens_ptr, tile, first_sequence, num_sequences, TOKENS * CONSUMERS, SEQUENCES
        )
        query = end - (stop - token)
        first = _first_key(cfg, query)
        last = gl.maximum(gl.minimum(query + TOKENS * CONSUMERS, end) - 1, 0)
        blocks = (last - first) // cfg.BLOCK + 1
        of_part = gl.maximum(gl.cdiv(blocks, shares), FEWEST_BLOCKS) if cfg.SHARES > 1 else blocks
        part = index % shares
        if (token < stop) & (part * of_part < blocks):
            newest = blocks - 1 - part * of_part
            oldest = gl.maximum(newest + 1 - of_part, 0)
            slot = number % SLOTS
            mbarrier.wait(shared.queries_empty.index(slot), ((number // SLOTS) & 1) ^ 1)
            shared.put(slot, HEAD, head)
            shared.put(slot, TOKEN, token)
            shared.put(slot, COUNT, stop - token)
            shared.put(slot, QUERY, query)
            shared.put(slot, END, end)
            if cfg.SHARES > 1:
                shared.put(slot, NEWEST, newest)
                shared.put(slot, OLDEST, oldest)
                shared.put(slot, PART, part)
                shared.put(slot, PARTS, gl.cdiv(blocks, of_part))
                shared.put(slot, SUMS, pair * shares)
            arrived = shared.queries_full.index(slot)
            _load_queries(shared, queries, angles, slot, token, head, query, arrived)
            row_ptr = table_ptr + sequence.to(gl.int64) * table_stride
            for i in range(newest - oldest + 1):
                _load_block(cfg, shared, pages, row_ptr, head, first + (newest - i) * cfg.BLOCK, end, at)
                at += 1
            number += 1
        index = following
    if index == pairs * shares + gl.num_programs(0) - 1:  # the last to be told
        gl.store(counter_ptr, 0)
    slot = number % SLOTS
    mbarrier.wait(shared.queries_empty.index(slot), ((number // SLOTS) & 1) ^ 1)
    shared.put(slot, HEAD, -1)
    mbarrier.arrive(shared.queries_full.index(slot), count=1)


@gluon.jit
def _load_queries(shared, queries, angles, slot, token, head, query, arrived):
    """Queries of all consumers, and their angles if the kernel rotates them.

    A query's position is its place in the context.
    """
    shape: gl.constexpr = [SLOTS * CONSUMERS, TOKENS, HEADS, HEAD_DIM]
    boxes = reinterpret(shared.queries, queries.dtype, shape, queries.layout)
    nbytes: gl.constexpr = queries.block_type.nbytes
    if angles is None:
        mbarrier.expect(arrived, CONSUMERS * nbytes)
    else:
        mbarrier.expect(arrived, CONSUMERS * (nbytes + 2 * angles.block_type.nbytes))
    for c in gl.static_range(CONSUMERS):
        at = slot * CONSUMERS + c
        async_load(queries, [token + c * TOKENS, head * HEADS, 0], arrived, boxes.index(at))
        if angles is not None:
            for half in gl.static_range(2):
                where = [query + c * TOKENS, half * (HEAD_DIM // 2)]
                async_load(angles, where, arrived, shared.angles.index(at * 2 + half))


@gluon.jit
def _load_block(cfg, shared, pages, row_ptr, head, key, end, at):
    """Keys and values from `key` on, into the stage of block `at`."""
    per_block: gl.constexpr = cfg.BLOCK // PAGE
    shape: gl.constexpr = [cfg.STAGES * 2 * per_block, 1, 1, 1, PAGE, HEAD_DIM]
    boxes = reinterpret(shared.ring, pages.dtype, shape, pages.layout)
    stage = at % cfg.STAGES
    ids = ()
    for p in gl.static_range(per_block):
        ids += (gl.load(row_ptr + key // PAGE + p, key + p * PAGE < end, other=-1),)
    mbarrier.wait(shared.empty.index(stage), ((at // cfg.STAGES) & 1) ^ 1)
    full = shared.full.index(stage)
    mbarrier.expect(full, 2 * per_block * pages.block_type.nbytes)
    for kind in gl.static_range(2):
        for p in gl.static_range(per_block):
            box = boxes.index((stage * 2 + kind) * per_block + p)
            async_load(pages, [ids[p], kind, head, 0, 0], full, box)


@gluon.jit
def _consume(c: gl.constexpr, cfg, shared, sums_ptr, counter_ptr, out_ptr, sinks_ptr, ROTATED: gl.constexpr):
    """One of the warpgroups: `c` says which rows of each tile it computes. ROTATED: the queries come rotated."""
    gdc_wait()
    at = 0  # blocks so far
    number = 0  # tiles so far
    mbarrier.wait(shared.queries_full.index(0), 0)
    head = shared.get(0, HEAD)
    while head >= 0:
        slot = number % SLOTS
        query, end = shared.get(slot, QUERY), shared.get(slot, END)
        head_M = head * HEADS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(cfg.BLOCK))) % HEADS
        sink_M = gl.load(sinks_ptr + head_M).to(gl.float32) * LOG2E
        tile = shared.queries.index(slot * CONSUMERS + c)
        if not ROTATED:
            _rotate(shared, tile, slot * CONSUMERS + c)
        out_MD, max_M, sum_M, at = _attend(cfg, c, shared, slot, tile, query, end, sink_M, at)
        is_last = True
        if cfg.SHARES > 1:
            parts = shared.get(slot, PARTS)
            if parts > 1:
                first, part = shared.get(slot, SUMS) * CONSUMERS + c, shared.get(slot, PART)
                arrivals_ptr = counter_ptr + 1 + first
                found = _add(sums_ptr, first * SUMS_SIZE, arrivals_ptr, parts, part, out_MD, max_M, sum_M)
                out_MD, sum_M, is_last = found
        if is_last:
            tile.store((out_MD * _by_row(1.0 / sum_M, out_MD)[:, None]).to(tile.dtype))
            barrier()
            token, count = shared.get(slot, TOKEN) + c * TOKENS, shared.get(slot, COUNT) - c * TOKENS
            head = shared.get(slot, HEAD)  # again, so that no register keeps it meanwhile
            row_M = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
            column_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, VALUES))
            out_M = (token + row_M // HEADS).to(gl.int64) * (cfg.KV_HEADS * HEADS) + head * HEADS + row_M % HEADS
            out_ptrs = out_ptr + out_M[:, None] * HEAD_DIM + column_D[None, :]
            gl.store(out_ptrs, tile.load(VALUES), (row_M // HEADS < count)[:, None])
        fence_async_shared()
        mbarrier.arrive(shared.queries_empty.index(slot), count=1)
        number += 1
        mbarrier.wait(shared.queries_full.index(number % SLOTS), (number // SLOTS) & 1)
        head = shared.get(number % SLOTS, HEAD)


@gluon.jit
def _add(sums_ptr, at, arrivals_ptr, parts, part, out_MD, max_M, sum_M):
    """Leaves the sums of a part with those of the others; element `at` is the first of part 0 of a consumer.

    Returns (the sums of p v of all parts, the sums of p, True) if all are there, else (anything, anything, False).
    """
    rows: gl.constexpr = max_M.type.layout
    sums_at, stats_at = _places(at + part * (CONSUMERS * SUMS_SIZE), rows)
    gl.store(sums_ptr + sums_at, out_MD)
    gl.store(sums_ptr + stats_at, max_M)
    gl.store(sums_ptr + stats_at + ROWS, sum_M)
    # Every thread's part must be written before the one thread that counts says so.
    barrier()
    is_last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == parts - 1
    if is_last:
        gl.store(arrivals_ptr, 0)
        out_MD, sum_M = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT), gl.zeros([ROWS], gl.float32, rows)
        max_M = gl.full([ROWS], float("-inf"), gl.float32, rows)
        next_MD, next_max_M, next_sum_M = _load_sums(sums_ptr, at, rows)
        for other in range(parts):  # this part too, so that their order decides nothing
            part_MD, part_max_M, part_sum_M = next_MD, next_max_M, next_sum_M
            at += CONSUMERS * SUMS_SIZE * (other < parts - 1).to(gl.int32)
            next_MD, next_max_M, next_sum_M = _load_sums(sums_ptr, at, rows)
            new_max_M = gl.maximum(max_M, part_max_M)
            rescale_M, weight_M = gl.exp2(max_M - new_max_M), gl.exp2(part_max_M - new_max_M)
            sum_M = sum_M * rescale_M + part_sum_M * weight_M
            out_MD = out_MD * _by_row(rescale_M, out_MD)[:, None] + part_MD * _by_row(weight_M, out_MD)[:, None]
            max_M = new_max_M
    return out_MD, sum_M, is_last


@gluon.jit
def _load_sums(sums_ptr, at, rows: gl.constexpr):
    """Other programs wrote these: read from the L2, where a line of the L1 could be stale."""
    sums_at, stats_at = _places(at, rows)
    part_MD = gl.load(sums_ptr + sums_at, cache_modifier=".cg")
    max_M = gl.load(sums_ptr + stats_at, cache_modifier=".cg")
    return part_MD, max_M, gl.load(sums_ptr + stats_at + ROWS, cache_modifier=".cg")


@gluon.jit
def _places(at, rows: gl.constexpr):
    """Elements of the sums of p v, and of the maxima. What did not depend on `at` would be kept from tile to tile."""
    row_M = at + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT)) * HEAD_DIM
    sums_at = row_M[:, None] + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUTPUT))[None, :]
    return sums_at, at + ROWS * HEAD_DIM + gl.arange(0, ROWS, rows)


@gluon.jit
def _rotate(shared, tile, at):
    """Rotates the queries of a consumer in place, by angles `at`."""
    pairs = gl.permute(gl.reshape(tile.load(HALVES), [TOKENS, HEADS, 2, HEAD_DIM // 2]), [0, 1, 3, 2])
    first, second = gl.split(pairs)
    layout: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    cos = shared.angles.index(at * 2).load(layout)[:, None, :]
    sin = shared.angles.index(at * 2 + 1).load(layout)[:, None, :]
    first, second = first.to(gl.float32), second.to(gl.float32)
    pairs = gl.join(first * cos - second * sin, second * cos + first * sin).to(tile.dtype)
    rotated = gl.reshape(gl.permute(pairs, [0, 1, 3, 2]), [ROWS, HEAD_DIM])
    tile.store(gl.convert_layout(rotated, HALVES, assert_trivial=True))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend(cfg, c: gl.constexpr, shared, slot, tile, tile_query, end, sink_M, at):
    """A consumer's sums of p v [ROWS, HEAD_DIM], maxima and sums of p [ROWS], and the blocks so far.

    A tile, and a part of one, has at least one block.
    """
    N: gl.constexpr = cfg.BLOCK
    first = _first_key(cfg, tile_query)
    query = tile_query + c * TOKENS
    last = gl.maximum(gl.minimum(query + TOKENS, end) - 1, 0)
    newest = gl.maximum(last - first, 0) // N  # the first block of this consumer
    if cfg.SHARES > 1:  # no window
        tile_newest, oldest = shared.get(slot, NEWEST), shared.get(slot, OLDEST)
        newest = gl.minimum(newest, tile_newest)
    else:
        tile_last = gl.maximum(gl.minimum(tile_query + TOKENS * CONSUMERS, end) - 1, 0)
        tile_newest = (tile_last - first) // N
        oldest = gl.minimum((_first_key(cfg, query) - first) // N, newest)
    query_M = query + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(N))) // HEADS

    at = _skip(cfg, shared, tile_newest - newest, at)
    key = first + newest * N
    _await_block(cfg, shared, at, True)
    _clear_from(cfg, shared, at, end - key)
    score_MN = warpgroup_mma_wait(0, deps=[_scores(cfg, shared, tile, at)])
    score_MN = _masked(cfg, score_MN, query_M - key)
    max_M = gl.maximum(sink_M, gl.max(score_MN, 1) * SCALE)
    p_MN = gl.exp2(score_MN * SCALE - max_M[:, None])
    sums_M8 = _partial_sums(p_MN)
    sink_sum_M = gl.exp2(sink_M - max_M) / 8
    if cfg.SHARES > 1:
        sink_sum_M = gl.where(shared.get(slot, PART) == 0, sink_sum_M, 0.0)
    sums_M8 += _by_row(sink_sum_M, sums_M8)[:, None]
    state = (_packed(p_MN), gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT), max_M, sums_M8)
    _await_block(cfg, shared, at + 1, newest > oldest)
    if cfg.WINDOW:
        for i in range(newest - oldest):
            state = _block(cfg, shared, tile, state, query_M - (key - (i + 1) * N), at, newest - oldest - i > 1, True)
            at += 1
    else:
        masked = gl.maximum(gl.minimum(gl.maximum(query + 1, 0) // N, newest), oldest)  # the oldest such block
        if newest > masked:  # by one: the rows of a consumer are of few tokens
            state = _block(cfg, shared, tile, state, query_M - (key - N), at, newest - oldest > 1, True)
            at += 1
        for i in range(masked - oldest):
            state = _block(cfg, shared, tile, state, query_M, at, masked - oldest - i > 1, False)
            at += 1
    pairs, out_MD, max_M, sums_M8 = state
    out_MD = warpgroup_mma(
        _operand(pairs, tile.dtype), shared.ring.index(at % cfg.STAGES * 2 + 1), out_MD, is_async=True
    )
    sum_M = gl.convert_layout(gl.sum(sums_M8, 1), max_M.type.layout, assert_trivial=True)
    out_MD = warpgroup_mma_wait(0, deps=[out_MD])
    mbarrier.arrive(shared.empty.index(at % cfg.STAGES), count=1)
    at += 1
    if cfg.WINDOW:
        at = _skip(cfg, shared, oldest, at)
    return out_MD, max_M, sum_M, at


@gluon.jit
def _block(cfg, shared, tile, state, limit_M, at, more, MASKED: gl.constexpr):
    """Adds the values of block `at`, whose probabilities are in the state, and puts those of the next in their place.

    The next block has been waited for. Whether there are more: the one after it is waited for, behind the exponentials;
    as this is a branch, the assembler cannot move the wait for the values before them.
    """
    pairs, out_MD, max_M, sums_M8 = state
    score_MN = _scores(cfg, shared, tile, at + 1)
    out_MD = warpgroup_mma(
        _operand(pairs, tile.dtype), shared.ring.index(at % cfg.STAGES * 2 + 1), out_MD, is_async=True
    )
    score_MN = warpgroup_mma_wait(1, deps=[score_MN])
    if MASKED:
        score_MN = _masked(cfg, score_MN, limit_M)
    new_max_M = gl.maximum(max_M, gl.max(score_MN, 1) * SCALE)
    next_MN = gl.exp2(score_MN * SCALE - new_max_M[:, None])
    rescale_M = gl.exp2(max_M - new_max_M)
    sums_M8 = sums_M8 * _by_row(rescale_M, sums_M8)[:, None] + _partial_sums(next_MN)
    _await_block(cfg, shared, at + 2, more)
    out_MD = warpgroup_mma_wait(0, deps=[out_MD])
    mbarrier.arrive(shared.empty.index(at % cfg.STAGES), count=1)
    out_MD *= _by_row(rescale_M, out_MD)[:, None]
    return _packed(next_MN), out_MD, new_max_M, sums_M8


@gluon.jit
def _scores(cfg, shared, tile, at):
    """Starts q k of a block."""
    keys = shared.ring.index(at % cfg.STAGES * 2)
    zeros = gl.zeros([ROWS, cfg.BLOCK], gl.float32, score_layout(cfg.BLOCK))
    return warpgroup_mma(tile, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _masked(cfg, score_MN, limit_M):
    """-inf for the keys of a block that a row must not see; limit_M: its query, counted from the block's first key.

    Key 8 b + i is compared as 8 b with the limit - i, so that one side is a constant.
    """
    score_MB8 = gl.reshape(score_MN, [ROWS, cfg.BLOCK // 8, 8])
    layout: gl.constexpr = score_MB8.type.layout
    key_8 = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    key_B = gl.arange(0, cfg.BLOCK // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    limit_M = gl.convert_layout(limit_M, gl.SliceLayout(1, gl.SliceLayout(1, layout)), assert_trivial=True)
    limit_M8 = limit_M[:, None] - key_8[None, :]
    visible_MB8 = key_B[None, :][:, :, None] <= limit_M8[:, None, :]
    if cfg.WINDOW:
        visible_MB8 &= key_B[None, :][:, :, None] > (limit_M8 - cfg.WINDOW)[:, None, :]
    score_MB8 = gl.where(visible_MB8, score_MB8, float("-inf"))
    return gl.convert_layout(gl.reshape(score_MB8, score_MN.shape), score_MN.type.layout, assert_trivial=True)


@gluon.jit
def _await_block(cfg, shared, at, wanted):
    """Waits until block `at` has arrived; not `wanted`: does nothing."""
    mbarrier.wait(shared.full.index(at % cfg.STAGES), (at // cfg.STAGES) & 1, pred=wanted)


@gluon.jit
def _clear_from(cfg, shared, at, inside):
    """Zeroes the values of a block after the first `inside`. Consumers may do so together: all store the same."""
    if inside < cfg.BLOCK:
        values = shared.ring.index(at % cfg.STAGES * 2 + 1)
        key_N = gl.arange(0, cfg.BLOCK, gl.SliceLayout(1, VALUES))
        values.store(gl.where((key_N < inside)[:, None], values.load(VALUES), 0.0))
        fence_async_shared()
        barrier()


@gluon.jit
def _skip(cfg, shared, count, at):
    """Releases the next `count` blocks, which a consumer does not read."""
    for _ in range(count):
        mbarrier.wait(shared.full.index(at % cfg.STAGES), (at // cfg.STAGES) & 1)
        barrier()  # one thread arrives for all: a warp that still waits could miss a phase
        mbarrier.arrive(shared.empty.index(at % cfg.STAGES), count=1)
        at += 1
    return at


@gluon.jit
def _partial_sums(p_MN):
    """[M, 8]: sums over every eighth key, so that no thread needs what another one has."""
    return gl.sum(gl.reshape(p_MN, [ROWS, p_MN.shape[1] // 8, 8]), 1)


@gluon.jit
def _packed(p_MN):
    """[M, N / 2] of pairs of bfloat16. Loops carry these: as single elements they would be moved between halves."""
    even, odd = gl.split(gl.reshape(p_MN, [ROWS, p_MN.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _operand(pairs, dtype: gl.constexpr):
    """Pairs of bfloat16 as the operand [M, N] of a product."""
    even = pairs.to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    p_MN = gl.reshape(gl.join(even, odd), [ROWS, pairs.shape[1] * 2])
    return gl.convert_layout(p_MN, gl.DotOperandLayout(0, OUTPUT, 2), assert_trivial=True)


@gluon.jit
def _by_row(x_M, like):
    """x_M for the rows of another tensor, which the same threads have."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like.type.layout), assert_trivial=True)


@gluon.jit(do_not_specialize=["table_stride", "first_sequence", "num_sequences", "num_tokens"])
def prefill_kernel(
    queries,
    angles,
    pages,
    out_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    counts_ptr,
    sinks_ptr,
    counter_ptr,
    sums_ptr,
    table_stride,
    first_sequence,
    num_sequences,
    num_tokens,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
):
    """Writes out [tokens, KV_HEADS * HEADS, HEAD_DIM] bfloat16, for the sequences from first_sequence on.

    Any grid of programs that run together. counts: of Batch, or None; then they are first_sequence and num_sequences.
    counter: int32, 0 before and after. If SHARES > 1: behind it as many as there may be parts, times
    CONSUMERS, and sums float32 [ROUNDS * programs, CONSUMERS, SUMS_SIZE]; else both are not used.

    Descriptors: queries [tokens, KV_HEADS * HEADS, HEAD_DIM] and pages [pages, 2, KV_HEADS, PAGE, HEAD_DIM], bfloat16;
    angles float32 [positions, HEAD_DIM], cosines then sines, or None if queries are rotated already. WINDOW 0 is full
    attention.
    """
    gdc_launch_dependents()
    cfg = Config(BLOCK, STAGES, WINDOW, KV_HEADS, SHARES)
    shared = Shared(
        gl.allocate_shared_memory(queries.dtype, [SLOTS * CONSUMERS, ROWS, HEAD_DIM], TILE),
        gl.allocate_shared_memory(gl.float32, [SLOTS * CONSUMERS * 2, TOKENS, HEAD_DIM // 2], ANGLES),
        gl.allocate_shared_memory(pages.dtype, [STAGES * 2, BLOCK, HEAD_DIM], TILE),
        gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], WORDS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.queries_full.index(slot), count=1)
        mbarrier.init(shared.queries_empty.index(slot), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(stage), count=1)
        mbarrier.init(shared.empty.index(stage), count=CONSUMERS)
    produced = (
        cfg, shared, queries, angles, pages, table_ptr, starts_ptr, lens_ptr, counts_ptr, counter_ptr, table_stride,
        first_sequence, num_sequences, num_tokens,
    )  # fmt: skip
    rotated: gl.constexpr = angles is None
    gl.warp_specialize(
        [
            (_consume, (0, cfg, shared, sums_ptr, counter_ptr, out_ptr, sinks_ptr, rotated)),
            (_consume, (1, cfg, shared, sums_ptr, counter_ptr, out_ptr, sinks_ptr, rotated)),
            (_consume, (2, cfg, shared, sums_ptr, counter_ptr, out_ptr, sinks_ptr, rotated)),
            (_produce, produced),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
