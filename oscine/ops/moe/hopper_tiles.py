"""The work of the programs of the Hopper experts' GEMM: entries, tiles and pairs.

A tile is (entry, row tile, split of k); an entry is up to N rows of tokens, sorted by expert, of one expert. h has a
row for each pair (token, which of its experts), an entry's beside each other. With so few pairs that a warp can hold
them, nothing is sorted: an entry is an expert that some token chose, and GEMM 1's columns are all tokens, or that token
and undefined columns. GEMM 1 drops the results of tokens that did not choose the expert. It notes the row of h of each
pair, so that GEMM 2 finds the rows as if they had been sorted. The entries of a single token are its experts.

hopper_gemm.py has the weights, barriers and registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_wait

from oscine.ops.moe import fp8
from oscine.ops.moe.hopper_choice import choose_experts
from oscine.ops.record import record

DIRECT_PAIRS = 32  # (token, expert) pairs that need no sort: one for each thread of a warp


@record
class Config:
    """What is known when the kernel is compiled."""

    N: gl.constexpr  # tokens of a tile
    PLANES: gl.constexpr  # of FP8 that tokens and h are: 2, which are two columns, or 1; 0: fp16
    UNITS: gl.constexpr  # units of k in a stage
    STAGES: gl.constexpr
    # short tiles have loops of their own: up to N / 2 tokens; DIRECT, one token; N from 128 on, up to N / 4 too
    HALVES: gl.constexpr
    # 0, or between N / 2 and N: tiles of up to so many tokens are two products; TMA loads boxes of N / 4 tokens
    MIDDLE: gl.constexpr
    DYNAMIC: gl.constexpr  # dynamic tile scheduler: a program takes tiles one by one, else every num_programs-th
    SPLITS: gl.constexpr  # parts of k that become separate partial sums
    K_UNITS: gl.constexpr
    UNIT_ROWS: gl.constexpr  # of one expert
    ROWS: gl.constexpr  # valid rows of the output: I (gated) or H
    GATED: gl.constexpr  # GEMM 1: SwiGLU epilogue
    SINGLE: gl.constexpr  # one token: the table is its experts, or with CHOICE the router's logits
    DIRECT: gl.constexpr  # a few tokens: the table is the experts of each
    EXPERTS_PER_TOKEN: gl.constexpr
    CHOICE: gl.constexpr  # experts that each kernel chooses from by itself (hopper_choice.py); 0: the router has chosen
    CONSUMERS: gl.constexpr  # warpgroups of a program that multiply
    LIMIT: gl.constexpr  # of SwiGLU, a float
    H_FACTOR: gl.constexpr  # of h as PLANES: no |h| saturates
    STEPS: gl.constexpr  # stages along k
    ROW_TILES: gl.constexpr  # of an entry
    PART: gl.constexpr  # columns that an epilogue handles at a time, to bound the registers
    STAGED: gl.constexpr  # results are collected in shared memory, and stored in whole sectors
    AHEAD: gl.constexpr  # products of a stage that may be in flight when the next one starts
    WINDOW: gl.constexpr  # stages of weights that may be under way; 0: all
    RANK: gl.constexpr  # of what adapters add to the products; 0: nothing
    MOST: gl.constexpr  # RANK: adapters of an entry


h_factor = gluon.constexpr_function(fp8.h_factor)


@record
class Entries:
    """All entries to compute; each thread of a DIRECT kernel holds one pair."""

    table_ptr: gl.tensor
    count: gl.tensor
    entry_P: gl.tensor  # of the pair's expert, for the first of its pairs, else 32: behind all entries
    expert_P: gl.tensor
    members_P: gl.tensor  # bit p: whether pair p has the same expert
    chosen: gl.tensor  # CHOICE: the ids of the experts, byte by byte


# Among the threads with pairs of one expert, the first one reports it. Entries are numbered in the order of the
# reports.
FIND_ENTRIES = gl.constexpr("""{
    .reg .pred real, first;
    .reg .b32 earlier, below, named;
    mov.u32 below, %lanemask_lt;
    match.any.sync.b32 $2, $3, 0xFFFFFFFF;
    and.b32 earlier, $2, below;
    setp.ge.s32 real, $3, 0;
    setp.eq.and.u32 first, earlier, 0, real;
    vote.sync.ballot.b32 named, first, 0xFFFFFFFF;
    popc.b32 $1, named;
    and.b32 named, named, below;
    popc.b32 $0, named;
    @!first mov.b32 $0, 32;
}""")


@gluon.jit
def find_entries(cfg, table_ptr, num_tokens, WARPS: gl.constexpr):
    """From the table, for callers of so many warps."""
    pair_P = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    if cfg.DIRECT:
        expert_P = gl.load(table_ptr + pair_P, pair_P < num_tokens * cfg.EXPERTS_PER_TOKEN, other=-1).to(gl.int32)
        entry_P, count_P, members_P = gl.inline_asm_elementwise(
            FIND_ENTRIES, "=&r,=&r,=&r,r", [expert_P], dtype=(gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
        )
        count = gl.max(count_P, 0)
        entries = Entries(table_ptr, count, entry_P, expert_P, members_P, count)
    elif cfg.CHOICE > 0:
        chosen = choose_experts(table_ptr, cfg.CHOICE, cfg.EXPERTS_PER_TOKEN, WARPS)
        entries = Entries(table_ptr, gl.to_tensor(cfg.EXPERTS_PER_TOKEN), pair_P, pair_P, pair_P, chosen)
    else:
        count = gl.to_tensor(cfg.EXPERTS_PER_TOKEN) if cfg.SINGLE else gl.load(table_ptr)
        entries = Entries(table_ptr, count, pair_P, pair_P, pair_P, count)
    return entries


@record
class WorkTile:
    """Some rows of an entry's weights, and some of k, times the entry's tokens."""

    entry: gl.tensor
    expert: gl.tensor
    source: gl.tensor  # row of its tokens in what is multiplied
    first: gl.tensor  # row of h of its first pair
    rows: gl.tensor  # how many pairs it has
    members: gl.tensor  # DIRECT: bit p: whether pair p is one of them
    row_tile: gl.tensor  # of the weights
    begin: gl.tensor  # stage along k
    end: gl.tensor
    split: gl.tensor


@gluon.jit
def tile_at(cfg, entries, index):
    """The tile of this index below entries.count * ROW_TILES * SPLITS."""
    part: gl.constexpr = (cfg.STEPS + cfg.SPLITS - 1) // cfg.SPLITS
    entry = index // (cfg.ROW_TILES * cfg.SPLITS)
    rest = index % (cfg.ROW_TILES * cfg.SPLITS)
    row_tile = rest // cfg.SPLITS
    split = rest % cfg.SPLITS
    if cfg.SINGLE:
        if cfg.CHOICE > 0:
            expert = (entries.chosen >> (8 * entry)) & 255
        else:
            expert = gl.load(entries.table_ptr + entry).to(gl.int32)
        first = entry
        rows = gl.to_tensor(1)
        members = rows
    elif cfg.DIRECT:
        mine_P = entries.entry_P == entry
        expert = gl.sum(gl.where(mine_P, entries.expert_P, 0), 0)
        members = gl.sum(gl.where(mine_P, entries.members_P, 0), 0)
        first = _popc(gl.sum(gl.where(entries.entry_P < entry, entries.members_P, 0), 0))  # a pair has one expert
        rows = _popc(members)
    else:
        expert = gl.load(entries.table_ptr + 4 + entry * 4)
        first = gl.load(entries.table_ptr + 4 + entry * 4 + 1)
        rows = gl.load(entries.table_ptr + 4 + entry * 4 + 2)
        members = rows
    if cfg.GATED and cfg.SINGLE:
        source = gl.to_tensor(0)
    elif cfg.GATED and cfg.DIRECT:
        only = _popc(members - 1)  # the pair of an entry of one
        source = gl.where(rows == 1, only // cfg.EXPERTS_PER_TOKEN, 0)
    else:
        source = first
    begin = split * part
    end = gl.minimum(begin + part, cfg.STEPS)
    if part == 1:
        end = _unknown(end)
    return WorkTile(entry, expert, source, first, rows, members, row_tile, begin, end, split)


@gluon.jit
def _unknown(x):
    """The same, as a number that the compiler does not know.

    If it knows that a tile has one stage, it removes the loop over stages. The results of the second and third
    consumer are then wrong on an H100 (Triton 3.6), not in the interpreter.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def is_narrow(cfg, tile):
    """Whether the tile has so few tokens that they are loaded, and with HALVES computed, as fewer columns."""
    return tile.rows == 1 if cfg.DIRECT or cfg.SINGLE else (tile.rows <= cfg.N // 2) & cfg.HALVES


@gluon.jit
def quarters(cfg, tile):
    """How many quarters of N the tile's tokens are, 1 to 4."""
    return (tile.rows + cfg.N // 4 - 1) // (cfg.N // 4)


@gluon.jit
def _popc(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def note_order(tile, order_ptr, WARPS: gl.constexpr):
    """DIRECT: order[row of h] = pair, for the tile's entry. For callers of so many warps."""
    pair_P = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    row_P = tile.first + _popc(tile.members & ((1 << pair_P) - 1))
    gl.store(order_ptr + row_P, pair_P, (tile.members >> pair_P) & 1 != 0)


@gluon.jit
def rows_of(cfg, tile, column):
    """The rows of h of GEMM 1's columns, and which of them belong to a pair."""
    if cfg.DIRECT:
        pair = column * cfg.EXPERTS_PER_TOKEN  # the token's first; at most one of its pairs is a member
        chosen = (tile.members >> pair) & ((1 << cfg.EXPERTS_PER_TOKEN) - 1)
        row = tile.first + _popc(tile.members & ((1 << pair) - 1))
        wanted = gl.where(tile.rows == 1, column == 0, chosen != 0)
    else:
        row = tile.first + column
        wanted = column < tile.rows
    return row, wanted


@gluon.jit
def pairs_of(cfg, tile, column, order_ptr):
    """GEMM 2's columns: their pairs, and which of them exist."""
    wanted = column < tile.rows
    pair = tile.first + column if cfg.SINGLE else gl.load(order_ptr + tile.first + column, wanted, other=0)
    return pair, wanted


@record
class Added:
    """RANK: what adapters add (LowRankRows)."""

    factors: tma.tensor_descriptor  # [slots, E, N, R]; boxes of 64 rows and 16 ranks
    values: tma.tensor_descriptor  # boxes of the columns of N tokens and 16 ranks
    lists: gl.tensor
    rows: gl.tensor  # of values between those of the adapters of an entry


@gluon.jit
def list_of(cfg, added, tile):
    """Where the list of the tile's adapters begins: how many, then their slots."""
    return added.lists + tile.entry * (1 + cfg.MOST)


@gluon.jit
def adapters_ahead(cfg, added, tile, index):
    """(how many adapters the tile has, the slot of the first one), read before they are needed, but for the first tile
    of a program: then the kernel that writes them may not be done. Of parts of k, the first one has adapters."""
    count = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    if cfg.RANK > 0:  # noqa: SIM102 (one of the two is known when this is compiled)
        if index != gl.program_id(0):
            own = list_of(cfg, added, tile)
            count = gl.where(tile.split == 0, gl.load(own), 0)
            slot = gl.load(own + 1)
    return count, slot


@gluon.jit
def adapters_of(cfg, added, tile, index, count, slot):
    """The same when they are needed, from what was read before."""
    if index == gl.program_id(0):
        gdc_wait()
        own = list_of(cfg, added, tile)
        count = gl.where(tile.split == 0, gl.load(own), 0)
        slot = gl.load(own + 1)
    return count, slot
