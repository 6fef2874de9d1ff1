"""Queries, keys and values on Hopper: a norm and one more kernel for few tokens; cuBLAS and a third one for many.

For few tokens the norm leaves its division to the products, so that its programs need not know each other's squares:

    W (x w / rms) = (W (x w)) / rms        rms^2 = sum of squares of x / H + eps

A program computes the dimensions [a, a + R) and [32 + a, 32 + a + R) of one head, the pairs that rotate together, and
writes them where they belong. With few tokens more programs than heads are wanted, so that every SM has its share, but
the rotation cannot wait for a sum across programs. So the sum's columns are cut into parts, R is 32 / parts, and the 64
rows of the tensor cores' operand are these 2 R dimensions once for each part; with two parts:

                     tokens x lower   tokens x upper
    rows x lower         wanted          not used
    rows x upper        not used          wanted

Up to 32 tokens weights may be in 12 bits (hopper_bf12.py). Their groups of 16 rows are eight such pairs, so a program
then has 32 / parts / 8 groups for each part, and its rows are first put in the order above.

Shape suffixes: R pairs of dimensions of a program, T tokens of a program, S sums of squares of a token.
"""

from dataclasses import replace

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.interface import LowRank, QkvProjection, Queries, Shapes, Use, unmet
from oscine.ops.kv import fp8
from oscine.ops.kv.fp8 import is_fp8, page_size_of
from oscine.ops.linear.bf12_size import COLUMNS as ATOM
from oscine.ops.linear.hopper_bf12 import Bf12Matrix, dense_of
from oscine.ops.linear.hopper_bf12_stream import start_words, word_descriptor
from oscine.ops.linear.hopper_low_rank import joins, low_rank_sums, second_factors
from oscine.ops.linear.hopper_stream import CHUNK, Tile, descriptor, start_ring, streamable, tile_for, unstreamable
from oscine.ops.norm.triton import undivided_norm
from oscine.ops.qkv import triton as portable
from oscine.ops.target import Target

ADDS_UP = True  # partial sums over ranks (extensions/parallel/comm/ops.py)
CAN_LEAVE_ROTATION = True  # of queries, to attention
HEAD = 64  # the head dimension of the streaming kernel
CARRY, TOP_EXPONENT, LEAST_EXPONENT = map(gl.constexpr, (fp8.CARRY, fp8.TOP_EXPONENT, fp8.LEAST_EXPONENT))


# From the fewest tokens up. Parts are also the programs of a head; parts times tokens fill 8 columns or more.
TILES = (
    Tile(max_tokens=2, parts=4, stages=4),
    Tile(max_tokens=8, parts=2, stages=5),
    Tile(max_tokens=16, stages=5),
    Tile(max_tokens=32, stages=4),
    Tile(max_tokens=64, chunks=4, stages=3),
)
# The same of weights in 12 bits.
BF12_TILES = (
    Tile(max_tokens=2, parts=4, stages=3, early=3),
    Tile(max_tokens=8, parts=2, stages=5),
    Tile(max_tokens=8, stages=8),  # of keys in FP8 with a scale per token, for which parts are too many
    Tile(max_tokens=16, parts=2, stages=4),
    Tile(max_tokens=16, stages=5),
    Tile(max_tokens=32, parts=2, stages=3),
    Tile(max_tokens=32, stages=4, early=2),
)
# The same where tensor parallelism leaves so few heads that most SMs would have none.
FEW_HEADS = 40  # of queries, keys and values together
FEW_HEADS_TILES = (
    Tile(max_tokens=2, parts=4, stages=4),
    Tile(max_tokens=8, parts=4, stages=5),
    Tile(max_tokens=16, parts=2, stages=5),
    Tile(max_tokens=32, parts=2, stages=4),
    Tile(max_tokens=64, parts=2, stages=3),
)


@gluon.jit(do_not_specialize=["num_tokens"])
def qkv_kernel(
    weight,
    tokens,
    scale_ptr,
    squares_ptr,
    bias_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    kv_ptr,
    exponents_ptr,
    keys_ptr,
    added_ptr,
    low_ptr,
    second_ptr,
    num_tokens,
    eps,
    kv_page_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_slot_stride,
    adapter_stride,
    QUERY_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    HIDDEN: gl.constexpr,
    SQUARES: gl.constexpr,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    EARLY: gl.constexpr,
    RANK: gl.constexpr,
    LOW_SPLITS: gl.constexpr,
):
    PAIRS: gl.constexpr = 32 // PARTS
    COLUMNS: gl.constexpr = PARTS * TOKENS
    head = gl.program_id(0) // PARTS
    first_pair = (gl.program_id(0) % PARTS) * PAIRS
    zero = gl.to_tensor(0)
    if scale_ptr is None:
        ring = start_ring(weight, tokens, 2 * head, first_pair, zero, zero, 64, COLUMNS, CHUNKS, STAGES, STEPS)
    else:
        group = gl.program_id(0) * (PAIRS // 8)
        words = start_words(weight, tokens, group, zero, COLUMNS, CHUNKS, STAGES, STEPS, EARLY)

    layout: gl.constexpr = gl.BlockedLayout([2, 1], [PAIRS // 2, 64 // PAIRS], [1, 4], [0, 1])
    dim_R = first_pair + gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    valid_T = token_T < num_tokens
    first_bias = gl.load(bias_ptr + head * 64 + dim_R).to(gl.float32)
    second_bias = gl.load(bias_ptr + head * 64 + 32 + dim_R).to(gl.float32)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    if RANK:
        rows: gl.constexpr = PAIRS if PAIRS * RANK < 256 else 256 // RANK
        threads: gl.constexpr = [rows, 256 // RANK // rows, RANK // 8]
        ranked: gl.constexpr = gl.BlockedLayout([1, 1, 8], threads, [1, gl.num_warps(), 1], [2, 1, 0])
        row_N = head * 64 + first_pair + gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, ranked)))
        own_T = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, ranked)))
        num_rows: gl.constexpr = (QUERY_HEADS + 2 * KV_HEADS) * 64
        place = second_ptr, own_T, num_tokens
        first_factors = second_factors(keys_ptr, *place, row_N, num_rows, adapter_stride, RANK, ranked)
        other_factors = second_factors(keys_ptr, *place, row_N + 32, num_rows, adapter_stride, RANK, ranked)
    if scale_ptr is None:
        ring.depend()
    else:
        first_scale = gl.load(scale_ptr + head * 64 + dim_R)
        second_scale = gl.load(scale_ptr + head * 64 + 32 + dim_R)
        operands = words.depend(mma)
    position_T = gl.load(positions_ptr + token_T, valid_T, other=0)
    slot_T = gl.load(slots_ptr + token_T, valid_T, other=0)
    square_T = gl.zeros([TOKENS], gl.float32, gl.SliceLayout(0, layout))
    for part in gl.static_range(SQUARES):
        square_T += gl.load(squares_ptr + token_T * SQUARES + part, valid_T, other=0)
    scale_T = gl.rsqrt(square_T / HIDDEN + eps)
    if RANK:
        part_of = (head >= QUERY_HEADS).to(gl.int32) + (head >= QUERY_HEADS + KV_HEADS).to(gl.int32)
        first_added = low_rank_sums(keys_ptr, low_ptr, first_factors, num_tokens, part_of, 3, LOW_SPLITS, ranked)
        other_added = low_rank_sums(keys_ptr, low_ptr, other_factors, num_tokens, part_of, 3, LOW_SPLITS, ranked)
    angle = cos_sin_ptr + position_T[None, :] * 64 + dim_R[:, None]
    rotates = head < QUERY_HEADS + KV_HEADS
    cos = gl.where(rotates, gl.load(angle), 1.0)
    sin = gl.where(rotates, gl.load(angle + 32), 0.0)

    products = gl.allocate_shared_memory(gl.float32, [64, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    if scale_ptr is None:
        sums = ring.multiply(mma)
    else:
        rows = words.multiply(operands, mma)
        halves = gl.permute(gl.reshape(rows, [PARTS, PAIRS // 8, 2, 8, COLUMNS]), [0, 2, 1, 3, 4])
        sums = gl.reshape(halves, [64, COLUMNS])
    products.store(sums)
    a = gl.zeros([PAIRS, TOKENS], gl.float32, layout)
    b = gl.zeros([PAIRS, TOKENS], gl.float32, layout)
    for part in gl.static_range(PARTS):
        columns = products.slice(part * TOKENS, TOKENS, 1)
        a += columns.slice(2 * part * PAIRS, PAIRS, 0).load(layout)
        b += columns.slice((2 * part + 1) * PAIRS, PAIRS, 0).load(layout)
    if scale_ptr is not None:
        a *= first_scale[:, None]
        b *= second_scale[:, None]
    if RANK:
        a += gl.convert_layout(first_added, layout)
        b += gl.convert_layout(other_added, layout)
    a = a * scale_T[None, :] + first_bias[:, None]
    b = b * scale_T[None, :] + second_bias[:, None]
    if added_ptr is not None:
        heads: gl.constexpr = QUERY_HEADS + 2 * KV_HEADS
        added_at = (token_T[None, :] * heads + head) * 64 + dim_R[:, None]
        has_T = valid_T & (gl.load(keys_ptr + token_T, valid_T, other=-1) >= 0)
        a += gl.load(added_ptr + added_at, has_T[None, :], other=0).to(gl.float32)
        b += gl.load(added_ptr + added_at + 32, has_T[None, :], other=0).to(gl.float32)
    first = a * cos - b * sin
    second = b * cos + a * sin

    valid = valid_T[None, :] & (dim_R < 64)[:, None]
    if head < QUERY_HEADS:
        q_at = (token_T[None, :] * QUERY_HEADS + head) * 64 + dim_R[:, None]
        gl.store(q_ptr + q_at, first.to(q_ptr.dtype.element_ty), valid)
        gl.store(q_ptr + q_at + 32, second.to(q_ptr.dtype.element_ty), valid)
    else:
        kind = ((head - QUERY_HEADS) // KV_HEADS).to(gl.int64)
        page_T = (slot_T // PAGE) * kv_page_stride
        page_T += kind * kv_kind_stride + ((head - QUERY_HEADS) % KV_HEADS) * kv_head_stride
        at_T = page_T + (slot_T % PAGE) * kv_slot_stride
        kv_at = at_T[None, :] + dim_R[:, None]
        if kv_ptr.dtype.element_ty == gl.uint8:
            if exponents_ptr is None:
                gl.static_assert(PARTS == 1, "a scale is of a whole head")
                bits_T = gl.max(gl.maximum(gl.abs(first), gl.abs(second)), 0).to(gl.int32, bitcast=True)
                exponent_T = gl.maximum(((bits_T + CARRY) >> 23) - TOP_EXPONENT, LEAST_EXPONENT)
            else:  # all parts of a head store the same ones
                exponent = gl.load(exponents_ptr + (head - QUERY_HEADS)).to(gl.int32)
                exponent_T = gl.full([TOKENS], 0, gl.int32, gl.SliceLayout(0, layout)) + exponent
            inverse = ((254 - exponent_T) << 23).to(gl.float32, bitcast=True)[None, :]
            gl.store(kv_ptr + page_T + PAGE * kv_slot_stride + slot_T % PAGE, exponent_T.to(gl.uint8), valid_T)
            gl.store(kv_ptr + kv_at, (first * inverse).to(gl.float8e4nv).to(gl.uint8, bitcast=True), valid)
            gl.store(kv_ptr + kv_at + 32, (second * inverse).to(gl.float8e4nv).to(gl.uint8, bitcast=True), valid)
        else:
            gl.store(kv_ptr + kv_at, first.to(kv_ptr.dtype.element_ty), valid)
            gl.store(kv_ptr + kv_at + 32, second.to(kv_ptr.dtype.element_ty), valid)


def stream(
    x_TH: Tensor, squares_TS: Tensor, eps: float, projection: QkvProjection, tile: Tile, low: LowRank | None = None
) -> Tensor:
    """Queries of x_TH / rms, where squares_TS [T, S] float32 are those of undivided_norm.

    Needs T <= max_tokens, heads of 64, and parts of whole 16 bytes. `low`: x_TH times first factors, where the norm
    has made it.
    """
    weight_FH, bias_F, cos_sin, positions_T, kv_pages, slots_T, exponents_2G, added = projection
    assert streamable(x_TH, dense_of(weight_FH))
    num_tokens, hidden = x_TH.shape
    num_kv_heads = kv_pages.shape[2]
    num_heads = weight_FH.shape[0] // HEAD
    num_query_heads = num_heads - 2 * num_kv_heads
    parts, width = tile.parts, hidden // tile.parts
    if isinstance(weight_FH, Bf12Matrix):
        weight, scale_F = word_descriptor(weight_FH, parts, tile.chunks), weight_FH.scale_F
    else:
        halves = weight_FH.view(2 * num_heads, HEAD // 2, parts, width).permute(2, 0, 1, 3)
        weight, scale_F = descriptor(halves, [parts, 2, HEAD // 2 // parts, CHUNK]), None
    tokens = x_TH.view(num_tokens, parts, width).permute(1, 0, 2)
    q_TQD = x_TH.new_empty(num_tokens, num_query_heads, HEAD)
    keys_T, y_STR, second, added_TF = None, None, None, None
    if added is not None:
        low = added.shrink(x_TH) if low is None else low
        if joins(added, tile.max_tokens):
            keys_T, y_STR, second = low
            tile = beside_adapters(tile)
        else:
            keys_T, added_TF = low.keys_T, added.expand(low, squares_TS, eps)
    page_stride, kind_stride, head_stride, slot_stride, _ = kv_pages.stride()
    qkv_kernel[(num_heads * parts,)](
        weight,
        descriptor(tokens, [parts, tile.max_tokens, CHUNK]),
        scale_F,
        squares_TS,
        bias_F,
        cos_sin,
        positions_T,
        slots_T,
        q_TQD,
        kv_pages,
        exponents_2G,
        keys_T,
        added_TF,
        y_STR,
        second,
        num_tokens,
        eps,
        page_stride,
        kind_stride,
        head_stride,
        slot_stride,
        0 if second is None else second.stride(0),
        QUERY_HEADS=num_query_heads,
        KV_HEADS=num_kv_heads,
        PAGE=page_size_of(kv_pages),
        HIDDEN=hidden,
        SQUARES=squares_TS.shape[1],
        PARTS=parts,
        **tile.projection_constants(width),
        RANK=0 if second is None else second.shape[-1],
        LOW_SPLITS=0 if y_STR is None else len(y_STR),
        num_warps=4,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return q_TQD


def beside_adapters(tile: Tile) -> Tile:
    """The tile with at most two stages of weights in registers, so that an SM holds three programs, not two."""
    return replace(tile, early=min(tile.early, 2))


def norm_qkv_use(shapes: Shapes) -> Use:
    missing = unstreamable(shapes.hidden, shapes.dtype) or unmet(("head dimension", HEAD, shapes.head_dim))
    return Use(f"up to {TILES[-1].max_tokens} tokens", "triton", missing)


def choose_tile(
    num_tokens: int, weight_FH: Tensor | Bf12Matrix, kv_pages: Tensor, exponents_2G: Tensor | None = None
) -> Tile | None:
    """None: there are more tokens than tiles of these weights take, or other heads, or TMA cannot read.

    In FP8 without calibrated exponents the scale of a key needs all of its dimensions, so heads have one program.
    """
    if kv_pages.shape[-1] != HEAD or not streamable(dense_of(weight_FH)):
        return None
    rows, hidden = weight_FH.shape
    narrow = isinstance(weight_FH, Bf12Matrix)
    tiles = BF12_TILES if narrow else TILES
    if rows <= FEW_HEADS * HEAD:
        tiles = (*(tile for tile in FEW_HEADS_TILES if tile.max_tokens <= tiles[-1].max_tokens), *tiles)
    most_parts = 1 if is_fp8(kv_pages) and exponents_2G is None else hidden
    multiple = ATOM if narrow else 8  # of the columns of a part
    return tile_for(
        num_tokens, (tile for tile in tiles if hidden % (multiple * tile.parts) == 0 and tile.parts <= most_parts)
    )


def norm_qkv(
    target: Target,
    x: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    residual_TH: Tensor | None,
    projection: QkvProjection,
    *,
    leave_rotation: bool = False,
) -> tuple[Queries, Tensor]:
    """See reference.py. Queries are rounded once, after the rotation; twice where cuBLAS is used.

    leave_rotation: attention can rotate queries, which it then does where cuBLAS is used.
    """
    pages = projection.kv_pages, projection.exponents_2G
    tile = choose_tile(len(x), projection.weight_FH, *pages)
    if tile is None and isinstance(projection.weight_FH, Bf12Matrix):
        projection = projection._replace(weight_FH=projection.weight_FH.dense)
        tile = choose_tile(len(x), projection.weight_FH, *pages)
    if tile is None:
        return portable.norm_qkv(target, x, norm_weight_H, eps, residual_TH, projection, leave_rotation=leave_rotation)
    within = projection.added if projection.added is not None and joins(projection.added, tile.max_tokens) else None
    x_TH, total_TH, squares_TS, low = undivided_norm(target, x, norm_weight_H, residual_TH, within)
    return stream(x_TH, squares_TS, eps, projection, tile, low), total_TH
