"""Published MXFP4 weights -> the units that the Hopper GEMM reads, in plain torch.

Knows the layouts on both sides; not tiles, kernels or devices.

A unit is 64 rows by 64 values along k. Its nibbles are 2048 bytes: thread t of a warpgroup reads bytes 16 t ..
16 t + 15 as two pairs of words (a, b), one pair for each 32 values along k, which share their scales. With
t = 32 warp + 4 g + q, pair p, the thread holds (as mma.m16n8k16 wants its left operand)

    row = 16 warp + 8 r + g,   k = 32 p + 16 j + 8 h + 2 q + z        for r, j, h, z in {0, 1}

The kernel wants the values z = 0 and 1 of one (j, h, r) in the lower and upper half of a word, sign at bit 15 and
magnitude (e1 e0 m) at bits 8..6. It turns a word left and masks it. Three of each word's four values lie so; the last
two lie in what is left of both words, and are reached in y, whose bits are those of a where BLEND says so, else those
of b << 2:

    (j, h, r)  000  001  010  011  100  101  110  111
    word         a    a    a    y    b    b    b    y
    turn         2    6   12    0    0    6   10   10

That is 16 instructions for 8 pairs of values, and a product each. The scales of a unit are 32 words, one for each
(warp, g): bytes (p, r) in the order (0, 0), (0, 1), (1, 0), (1, 1), each the E8M0 byte + 126.

Rows that pad a matrix to 64 hold zeros (and scale 0, which multiplies as 0), so does k.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

UNIT = 64
A, B, Y = 0, 1, 2
# (word, turn) by (j, h, r)
FIELDS = {
    (0, 0, 0): (A, 2),
    (0, 0, 1): (A, 6),
    (0, 1, 0): (A, 12),
    (0, 1, 1): (Y, 0),
    (1, 0, 0): (B, 0),
    (1, 0, 1): (B, 6),
    (1, 1, 0): (B, 10),
    (1, 1, 1): (Y, 10),
}
BLEND = 0xC180C180
BLEND_SHIFT = 2
VALUE_BITS = (6, 7, 8, 15)  # of a half word, where the bits m, e0, e1 and sign of a nibble end
SCALE_OFFSET = 126
MAX_SCALE = 128  # scale bytes 0..128 become the bf16 exponents 126..254; 255 would be no number


def repack(blocks: Tensor, scales: Tensor, row_order: Tensor | None = None, chunk: int = 8) -> tuple[Tensor, Tensor]:
    """uint8 blocks [E, rows, K / 32, 16] and scales [E, rows, K / 32] -> (nibbles, scales) in units.

    nibbles: uint8 [E * unit rows * k units * 8, 256]; scales: int32 [E * unit rows * k units, 32].
    row_order: the source row of each row, or -1 for a row of zeros. chunk: experts at a time, to bound the workspace.
    Raises ValueError for scales above 128.
    """
    if (largest := int(scales.max())) > MAX_SCALE:
        raise ValueError(f"the Hopper experts take MXFP4 scale bytes up to {MAX_SCALE} (2^1), not {largest}")
    experts, rows, k_blocks = scales.shape
    row_order = _to_units(rows, row_order, scales.device)
    units = row_order.numel() // UNIT * ((k_blocks + 1) // 2)
    nibbles_out = torch.empty(experts, units * 8, 256, dtype=torch.uint8, device=blocks.device)
    scales_out = torch.empty(experts, units, 32, dtype=torch.int32, device=blocks.device)
    for start in range(0, experts, chunk):
        part = slice(start, start + chunk)
        nibbles_out[part] = _nibbles(_even(_padded(blocks[part], row_order))).view(-1, units * 8, 256)
        scales_out[part] = _scales(_even(_padded(scales[part] + SCALE_OFFSET, row_order))).view(-1, units, 32)
    return nibbles_out.flatten(0, 1), scales_out.flatten(0, 1)


def gate_up_order(intermediate: int, device: torch.device) -> Tensor:
    """Source rows such that gate i and up i become rows g and g + 8 of one thread; -1 pads to whole units."""
    blocks = (intermediate + 31) // 32 * 4  # of 8 values of i
    i = torch.arange(blocks * 8, device=device).view(blocks, 1, 8)
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
    picked[:, row_order < 0] = 0
    return picked


def _even(source: Tensor) -> Tensor:
    """[E, rows, K / 32, ...] -> an even number of blocks along k."""
    if source.shape[2] % 2 == 0:
        return source
    return torch.cat((source, torch.zeros_like(source[:, :, :1])), dim=2)


def _nibbles(blocks: Tensor) -> Tensor:
    """uint8 [E, 64 R, 2 U, 16] -> [E, R, U, 2048]."""
    experts, rows, k_blocks, _ = blocks.shape
    tables = _byte_tables(blocks.device)
    # (expert, unit row, warp, r, g, unit, p, j, h, q) -> (expert, unit row, unit, warp, g, q, p, j, h, r)
    source = blocks.view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 2, 2, 2, 4)
    source = source.permute(0, 1, 5, 2, 4, 9, 6, 7, 8, 3)
    pairs = torch.zeros(source.shape[:-3], dtype=torch.int64, device=blocks.device)
    for j, h, r in FIELDS:
        pairs |= tables[j, h, r].index_select(0, source[..., j, h, r].flatten().int()).view(pairs.shape)
    return pairs.view(torch.uint8).view(experts, rows // UNIT, k_blocks // 2, 2048)


@functools.cache
def _byte_tables(device: torch.device) -> Tensor:
    """int64 [2 (j), 2 (h), 2 (r), 256]: what a byte, the values of z = 0 and 1, adds to its pair (a, b)."""
    tables = torch.zeros(2, 2, 2, 256, dtype=torch.int64)
    for field in FIELDS:
        for bit in range(8):
            half, place = divmod(bit, 4)
            value = 1 << _position(field, 16 * half + VALUE_BITS[place])
            tables[field] |= (torch.arange(256) >> bit & 1) * (value if value < 1 << 63 else value - (1 << 64))
    return tables.to(device)


def _position(field: tuple[int, int, int], bit: int) -> int:
    """Where in the pair, of 64 bits, a bit of a field's expanded word comes from."""
    word, turn = FIELDS[field]
    bit = (bit - turn) % 32
    if word == Y:
        word, bit = (A, bit) if BLEND >> bit & 1 else (B, bit - BLEND_SHIFT)
    return 32 * word + bit


def _scales(scales: Tensor) -> Tensor:
    """uint8 [E, 64 R, 2 U] -> int32 [E, R, U, 32]."""
    experts, rows, k_blocks = scales.shape
    # (expert, unit row, warp, r, g, unit, k half) -> (expert, unit row, unit, warp, g, k half, r)
    source = scales.view(experts, rows // UNIT, 4, 2, 8, k_blocks // 2, 2).permute(0, 1, 5, 2, 4, 6, 3)
    return source.flatten().view(torch.int32).view(experts, rows // UNIT, k_blocks // 2, 32)
