"""Published MXFP4 weights -> the units that the Hopper GEMM reads.

Knows the layouts on both sides; not tiles of the GEMM. On a GPU, Triton kernels place the nibbles in one pass. Torch
needs some 50, which adds 0.7 s to a start of 120b.

A unit is 64 rows by 64 values along k. Its nibbles are 2048 bytes: thread t = 32 warp + 4 g + q of a warpgroup reads
bytes 16 t .. 16 t + 15. A row's own scale is the largest scale of its blocks; blocks of zeros do not count. The scale
of a block is given by a factor f, relative to that of its row. Padding of rows and of k to multiples of 64 is zero.
There are two layouts:

WORDS, for exact activations. The bytes are two pairs of words (a, b), one pair for each 32 values along k, which share
their scales. Of pair p, the thread holds (as mma.m16n8k16 wants its left operand)

    row = 16 warp + 8 r + g,   k = 32 p + 16 j + 8 h + 2 q + z        for r, j, h, z in {0, 1}

The kernel rotates a word left and masks it. The result is four values in FP8 (e5m2: sign at bit 7 of a byte, magnitude
e1 e0 m at bits 3..1). The upper byte of each half is also a value in fp16, which has the same bits there. Byte 2 z + h
holds (h, z). Words a and b hold one (j, r) each in this way. The remaining bits of both are combined into two more
words: y takes the bits of a in the mask Y_FROM_A and those of b elsewhere; v takes the bits of b in the mask V_FROM_B
and those of a << 2 elsewhere:

    (j, r)     00   01   10   11
    word        a    b    y    v
    turn        0    3    5    0

That is 9 instructions for 16 values as FP8, and 17 as fp16.

The scale of a block is 2^(f - 30) times that of its row. f = 0 stands for a factor of zero, for blocks 2^30 times
smaller than another one of the row. fp16 rounds values below 2^-24 of the row. The scales of a unit are 32 words, one
for each (warp, g): f of (p, r) ends at bits 10, 0, 26 and 16 for (0, 0), (0, 1), (1, 0) and (1, 1).

TABLES, for activations in FP8. The bytes are four words, two for each row, as published but for the signs:

    row = 16 warp + 8 r + g,   k = 16 q + 8 i + n       for word 2 r + i, nibble n

so a thread's values of a row share a scale, and columns have the order of planes.py. A byte permutation (PRMT) takes
half a word as indices into eight bytes, the magnitudes of E2M1 times the scale of the block, in FP8 (e5m2). Bit 3 of a
nibble is no part of an index: it holds the sign of another value, of n < 4 at bit 8 n + 7 and of others at 8 n - 29.
A shift by 4 brings the latter to where those of bytes are. The scale of a block is 2^(f - 26) times that of its row;
blocks below are rounded to zeros. Scales are bytes f by (warp, g, block, r).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

UNIT = 64
A, B, Y, V = "abyv"
# (word, turn) by (j, r)
FIELDS = {(0, 0): (A, 0), (0, 1): (B, 3), (1, 0): (Y, 5), (1, 1): (V, 0)}
Y_FROM_A = 0x50505050
V_FROM_B = 0x0A0A0A0A
V_SHIFT = 2  # of a
VALUE_BITS = (1, 2, 3, 7)  # of a byte, where the bits m, e0, e1 and sign of a nibble end
SCALE_BITS = (10, 0, 26, 16)  # where f of (p, r) ends
# Factors of f and entries for f = 0 of a table's two words: 0, 1/2, 1, 3/2 and 2, 3, 4, 6, times 2^(f - 13)
TABLE = ((0x04040400, 0x0A080400), (0x04040404, 0x12100E0C))
NAN_SCALE = 255
UNITS = 4  # of a program of the kernels below
MAGNITUDES = 0x7777777777777777  # of sixteen nibbles


@dataclass(frozen=True, slots=True)
class Units:
    """A matrix of all experts."""

    nibbles: Tensor  # uint8 [E * unit rows * k units * 8, 256]
    scales: Tensor  # int32 [E * unit rows * k units, 32]
    row_scales: Tensor  # bf16 [E, unit rows * 64]; 2^(s - 128), s being the largest E8M0 byte of the row


class Layout(NamedTuple):
    most: int  # f of a row's largest scale
    nibbles: Callable[[Tensor], Tensor]  # uint8 [E, 64 R, 2 U, 16] -> [E, R, U, 2048]
    scales: Callable[[Tensor], Tensor]  # f, uint8 [E, 64 R, 2 U] -> int32 [E, R, U, 32]


def repack(
    blocks: Tensor, scales: Tensor, row_order: Tensor | None = None, chunk: int = 8, *, tables: bool = False
) -> Units:
    """uint8 blocks [E, rows, K / 32, 16] and scales [E, rows, K / 32] -> units.

    row_order: the source row of each row, or -1 for a row of zeros. chunk: experts at a time, to bound the workspace.
    Raises ValueError for scales that are NaN.
    """
    if (scales == NAN_SCALE).any():
        raise ValueError(f"MXFP4 scale byte {NAN_SCALE} is no number")
    layout = TABLES if tables else WORDS
    experts, rows, k_blocks = scales.shape
    row_order = _to_units(rows, row_order, scales.device)
    units = row_order.numel() // UNIT * ((k_blocks + 1) // 2)
    nibbles_out = torch.empty(experts, units * 8, 256, dtype=torch.uint8, device=blocks.device)
    scales_out = torch.empty(experts, units, 32, dtype=torch.int32, device=blocks.device)
    row_scales = torch.empty(experts, row_order.numel(), dtype=torch.bfloat16, device=scales.device)
    one = torch.ones((), dtype=torch.float64, device=scales.device)
    for start in range(0, experts, chunk):
        part = slice(start, start + chunk)
        largest = _largest_scales(blocks[part], scales[part])
        factors = scales[part].int() - largest[..., None] + layout.most
        rounded = torch.where((factors < 0)[..., None], 0, blocks[part])
        factors = factors.clamp(0, layout.most).byte()
        nibbles_out[part] = layout.nibbles(_even(_padded(rounded, row_order))).view(-1, units * 8, 256)
        scales_out[part] = layout.scales(_even(_padded(factors, row_order))).view(-1, units, 32)
        row_scales[part] = torch.ldexp(one, _padded(largest, row_order).double() - 128)
    return Units(nibbles_out.flatten(0, 1), scales_out.flatten(0, 1), row_scales)


def _largest_scales(blocks: Tensor, scales: Tensor) -> Tensor:
    """Of each row's blocks that are not zeros, int32 [E, rows]; 0 where all are."""
    words = blocks.view(torch.int64)  # a block is two; the sign of a zero does not matter
    return torch.where(((words & MAGNITUDES) != 0).any(-1), scales.int(), 0).amax(2)


def gate_up_order(intermediate: int, device: torch.device, *, tables: bool = False) -> Tensor:
    """Source rows such that gate i and up i become rows g and g + 8 of one thread; -1 pads to whole units.

    tables: as the second product wants its columns: in the order of planes.py, and padded to whole units of them.
    """
    multiple = UNIT if tables else UNIT // 2
    i = torch.arange(-(-intermediate // multiple) * multiple, device=device)
    if tables:
        i = i.view(-1, 4, 4, 4).transpose(1, 2).flatten()
    i = i.view(-1, 1, 8)
    is_up = torch.arange(2, device=device).view(1, 2, 1)
    return torch.where(i < intermediate, 2 * i + is_up, -1).flatten()


def padded_rows(bias: Tensor, row_order: Tensor | None) -> Tensor:
    """[E, rows] -> [E, unit rows * 64], in the order of repack's rows."""
    return _padded(bias, _to_units(bias.shape[1], row_order, bias.device))


def _to_units(rows: int, row_order: Tensor | None, device: torch.device) -> Tensor:
    if row_order is None:
        row_order = torch.arange(rows, device=device)
    return functional.pad(row_order, (0, -row_order.numel() % UNIT), value=-1)


def _padded(source: Tensor, row_order: Tensor) -> Tensor:
    """[E, rows, ...] -> the ordered rows, zeros where the order says -1."""
    picked = source[:, row_order.clamp(min=0)]
    is_row = (row_order >= 0).view(-1, *[1] * (source.ndim - 2))
    return torch.where(is_row, picked, 0)  # to look for -1 would wait for the GPU


def _even(source: Tensor) -> Tensor:
    """[E, rows, K / 32, ...] -> an even number of blocks along k."""
    if source.shape[2] % 2 == 0:
        return source
    return torch.cat((source, torch.zeros_like(source[:, :, :1])), dim=2)


def _nibbles(blocks: Tensor) -> Tensor:
    """uint8 [E, 64 R, 2 U, 16] -> [E, R, U, 2048]."""
    experts, rows, k_blocks, _ = blocks.shape
    tables = _byte_tables(blocks.device)
    if blocks.is_cuda:
        return _place_nibbles(words_kernel, blocks, tables)
    # (expert, unit row, warp, r, g, unit, p, j, h, q) -> (expert, unit row, unit, warp, g, q, p, j, h, r)
    source = blocks.view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 2, 2, 2, 4)
    source = source.permute(0, 1, 5, 2, 4, 9, 6, 7, 8, 3)
    pairs = torch.zeros(source.shape[:-3], dtype=torch.int64, device=blocks.device)
    for j, r in FIELDS:
        for h in range(2):
            pairs |= tables[j, r, h].index_select(0, source[..., j, h, r].flatten().int()).view(pairs.shape)
    return pairs.view(torch.uint8).view(experts, rows // UNIT, k_blocks // 2, 2048)


@functools.cache
def _byte_tables(device: torch.device) -> Tensor:
    """int64 [2 (j), 2 (r), 2 (h), 256]: what a byte, the values of z = 0 and 1, adds to its pair (a, b)."""
    tables = torch.zeros(2, 2, 2, 256, dtype=torch.int64)
    for (j, r), field in FIELDS.items():
        for h in range(2):
            for bit in range(8):
                z, place = divmod(bit, 4)
                value = 1 << _position(field, 8 * (2 * z + h) + VALUE_BITS[place])
                tables[j, r, h] |= (torch.arange(256) >> bit & 1) * (value if value < 1 << 63 else value - (1 << 64))
    return tables.to(device)


def _position(field: tuple[str, int], bit: int) -> int:
    """Where in the pair, of 64 bits, a bit of a field's expanded word comes from."""
    word, turn = field
    bit = (bit - turn) % 32
    if word == Y:
        word = A if Y_FROM_A >> bit & 1 else B
    elif word == V:
        word, bit = (B, bit) if V_FROM_B >> bit & 1 else (A, bit - V_SHIFT)
    return bit if word == A else 32 + bit


def _scales(factors: Tensor) -> Tensor:
    """uint8 [E, 64 R, 2 U] -> int32 [E, R, U, 32]."""
    experts, rows, k_blocks = factors.shape
    # (expert, unit row, warp, r, g, unit, p) -> (expert, unit row, unit, warp, g, p, r)
    source = factors.view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 2).permute(0, 1, 5, 2, 4, 6, 3)
    words = (source.int() << _shifts(factors.device)).sum((-2, -1), dtype=torch.int32)
    return words.view(experts, rows // UNIT, k_blocks // 2, 32)


@functools.cache
def _shifts(device: torch.device) -> Tensor:
    """int32 [2 (p), 2 (r)]: of SCALE_BITS. Kept, as a copy from the host waits for all work of a GPU."""
    return torch.tensor(SCALE_BITS, dtype=torch.int32).view(2, 2).to(device)


def _table_nibbles(blocks: Tensor) -> Tensor:
    experts, rows, k_blocks, _ = blocks.shape
    if blocks.is_cuda:
        return _place_nibbles(tables_kernel, blocks.view(torch.int32))
    # (expert, unit row, warp, r, g, unit, q, i) -> (expert, unit row, unit, warp, g, q, r, i)
    words = blocks.view(torch.int32).view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 4, 2)
    words = words.permute(0, 1, 5, 2, 4, 6, 3, 7).contiguous()
    out = words & 0x77777777
    for n in range(8):
        bit = 8 * n + 7 if n < 4 else 8 * n - 29
        out |= (words >> (4 * n + 3) & 1) << bit
    return out.view(torch.uint8).view(experts, rows // UNIT, k_blocks // 2, 2048)


def _table_scales(factors: Tensor) -> Tensor:
    experts, rows, k_blocks = factors.shape
    # (expert, unit row, warp, r, g, unit, block) -> (expert, unit row, unit, warp, g, block, r)
    source = factors.view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 2).permute(0, 1, 5, 2, 4, 6, 3)
    return source.flatten(-2).contiguous().view(torch.int32).view(experts, rows // UNIT, k_blocks // 2, 32)


def _place_nibbles(kernel: Any, blocks: Tensor, *tables: Tensor) -> Tensor:
    """The result of _nibbles by words_kernel, or of _table_nibbles by tables_kernel.

    `blocks`: as the kernel reads them.
    """
    assert blocks.is_contiguous()
    experts, rows, k_blocks, _ = blocks.shape
    units = k_blocks // 2
    out = torch.empty((experts, rows // UNIT, units, 2048), dtype=torch.uint8, device=blocks.device)
    written = out.view(torch.int64 if tables else torch.int32)
    grid = experts * rows // UNIT, triton.cdiv(units, UNITS)
    kernel[grid](blocks, *tables, written, units, UNITS=UNITS, num_warps=4, enable_fp_fusion=True)
    return out


@triton.jit(do_not_specialize=["units"])
def words_kernel(blocks_ptr, byte_tables_ptr, out_ptr, units, UNITS: tl.constexpr):
    """_nibbles of UNITS units. Grid (unit rows of all experts, units / UNITS)."""
    unit_row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, UNITS * 256)
    unit = tl.program_id(1) * UNITS + lane // 256
    warp, g, q, p = lane // 64 % 4, lane // 8 % 8, lane // 2 % 4, lane % 2
    inside = unit < units
    at = ((unit_row * 64 + 16 * warp + g) * units + unit) * 32 + 16 * p + q
    pairs = tl.zeros((UNITS * 256,), tl.int64)
    for j in tl.static_range(2):
        for r in tl.static_range(2):
            for h in tl.static_range(2):
                byte = tl.load(blocks_ptr + at + r * 8 * units * 32 + 8 * j + 4 * h, mask=inside, other=0)
                pairs |= tl.load(byte_tables_ptr + (4 * j + 2 * r + h) * 256 + byte.to(tl.int32))
    tl.store(out_ptr + (unit_row * units + unit) * 256 + lane % 256, pairs, mask=inside)


@triton.jit(do_not_specialize=["units"])
def tables_kernel(blocks_ptr, out_ptr, units, UNITS: tl.constexpr):
    """_table_nibbles of UNITS units, of words. Grid (unit rows of all experts, units / UNITS)."""
    unit_row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, UNITS * 512)
    unit = tl.program_id(1) * UNITS + lane // 512
    warp, g, q, r, i = lane // 128 % 4, lane // 16 % 8, lane // 4 % 4, lane // 2 % 2, lane % 2
    inside = unit < units
    at = ((unit_row * 64 + 16 * warp + 8 * r + g) * units + unit) * 8 + 2 * q + i
    word = tl.load(blocks_ptr + at, mask=inside, other=0)
    out = word & 0x77777777
    for n in tl.static_range(8):
        out |= (word >> (4 * n + 3) & 1) << (8 * n + 7 if n < 4 else 8 * n - 29)
    tl.store(out_ptr + (unit_row * units + unit) * 512 + lane % 512, out, mask=inside)


WORDS = Layout(30, _nibbles, _scales)
TABLES = Layout(26, _table_nibbles, _table_scales)
