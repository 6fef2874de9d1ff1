"""Repacked experts hold exactly the published values, where the kernel looks for them."""

import pytest
import torch
from torch import Tensor

from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.moe.repack import gate_up_order, repack


def unpack_bits(nibbles: Tensor, scales: Tensor, experts: int, rows: int, k: int) -> Tensor:
    """Does what the kernel does, element by element: shifts, masks, one bf16 product. float32 [E, rows, k]."""
    words = nibbles.view(experts, rows // 64, k // 64, 2048).view(torch.int32).view(experts, -1, k // 64, 128, 4).long()
    powers = (
        scales.view(experts, rows // 64, k // 64, 32, 1).view(torch.uint8).view(experts, -1, k // 64, 32, 4).short()
    )
    out = torch.full((experts, rows, k), torch.nan)
    for thread in range(128):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        for j in range(4):
            pair = words[:, :, :, thread, 2 * (j // 2) : 2 * (j // 2) + 2] & 0xFFFFFFFF
            a, b = pair[..., 0], pair[..., 1]
            y = (a & 0xC180C180) | ((b << 2) & 0x3E7F3E7F)
            if j % 2 == 0:
                expanded = {(0, 0): a << 2, (0, 1): a << 6, (1, 0): a << 12 | a >> 20, (1, 1): y}
            else:
                expanded = {(0, 0): b, (0, 1): b << 6, (1, 0): b << 10 | b >> 22, (1, 1): y << 10 | y >> 22}
            for (h, r), turned in expanded.items():
                scale = (powers[:, :, :, warp * 8 + g, j // 2 * 2 + r] << 7).view(torch.bfloat16)
                for z in range(2):
                    half = (turned >> (16 * z)) & 0x81C0
                    value = torch.where(half >= 1 << 15, half - (1 << 16), half).short().view(torch.bfloat16) * scale
                    row, column = 16 * warp + 8 * r + g, 16 * j + 8 * h + 2 * q + z
                    out[:, row::64, column::64] = value.float()
    return out


@pytest.mark.parametrize(("rows", "k"), [(64, 64), (128, 192), (96, 160)], ids=["unit", "units", "padded"])
def test_units_hold_the_published_values(rows: int, k: int) -> None:
    torch.manual_seed(rows)
    blocks = torch.randint(0, 256, (3, rows, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(0, 129, (3, rows, k // 32), dtype=torch.uint8)
    scales[:, ::7] = 0
    nibbles, powers = repack(blocks, scales, chunk=2)
    padded_rows, padded_k = (rows + 63) // 64 * 64, (k + 63) // 64 * 64
    values = unpack_bits(nibbles, powers, 3, padded_rows, padded_k)
    assert torch.equal(values[:, :rows, :k], dequantize(blocks, scales))
    assert not values[:, rows:].any()
    assert not values[:, :, k:].any()


def test_gate_and_up_share_a_thread() -> None:
    order = gate_up_order(40, torch.device("cpu"))
    assert order.numel() == 128
    assert order[:24].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 16, 18, 20, 22, 24, 26, 28, 30]
    assert sorted(order[order >= 0].tolist()) == list(range(80))


def test_gate_up_rows_are_reordered() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 129, (2, 64, 2), dtype=torch.uint8)
    order = gate_up_order(32, torch.device("cpu"))
    nibbles, powers = repack(blocks, scales, order)
    assert torch.equal(unpack_bits(nibbles, powers, 2, 64, 64), dequantize(blocks, scales)[:, order])


@pytest.mark.parametrize("bad", [129, 255])
def test_extreme_scales_are_refused(bad: int) -> None:
    scales = torch.full((1, 64, 2), 120, dtype=torch.uint8)
    scales[0, 3, 1] = bad
    with pytest.raises(ValueError, match=f"not {bad}"):
        repack(torch.zeros(1, 64, 2, 16, dtype=torch.uint8), scales)
