"""Repacked experts hold exactly the published values, where the kernel looks for them."""

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from oscine.ops.moe import hopper_repack, native
from oscine.ops.moe.hopper import prepare_experts
from oscine.ops.moe.hopper_repack import Units, gate_up_order, repack
from oscine.ops.moe.mxfp4 import dequantize
from tests.ops.bound import CPU_TARGET
from tests.ops.compile_ahead import compile_ahead, run_interpreted


def unpack(units: Units, experts: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Does what the kernels do, element by element, with weights in FP8 or fp16. float64 [E, rows, k]."""
    shape = experts, rows // 64, k // 64
    words = units.nibbles.view(*shape, 2048).view(torch.int32).view(*shape, 128, 2, 2).long() & 0xFFFFFFFF
    scales = units.scales.view(*shape, 32).long()
    out = torch.full((experts, rows, k), torch.nan, dtype=torch.float64)
    for thread, p in itertools.product(range(128), range(2)):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        a, b = words[..., thread, p, 0], words[..., thread, p, 1]
        y = (a & 0x50505050) | (b & 0xAFAFAFAF)
        v = (b & 0x0A0A0A0A) | (a << 2 & 0xF5F5F5F5)
        turned = {(0, 0): a, (0, 1): b << 3 | b >> 29, (1, 0): y << 5 | y >> 27, (1, 1): v}
        for (j, r), word in turned.items():
            f = scales[..., warp * 8 + g] >> (10, 0, 26, 16)[2 * p + r] & 31
            for h, z in itertools.product(range(2), repeat=2):
                byte = word >> 8 * (2 * z + h) & 0x8E
                row, column = 16 * warp + 8 * r + g, 32 * p + 16 * j + 8 * h + 2 * q + z
                out[:, row::64, column::64] = product(byte, f, dtype)
    return out * units.row_scales.double()[..., None]


def unpack_tables(units: Units, experts: int, rows: int, k: int) -> Tensor:
    """The same for weights that are looked up: each byte of e5m2 from its table, nibble by nibble. float64."""
    shape = experts, rows // 64, k // 64
    words = units.nibbles.view(*shape, 2048).view(torch.int32).view(*shape, 128, 2, 2).long() & 0xFFFFFFFF
    factors = units.scales.view(*shape, 32).view(torch.uint8).view(*shape, 32, 2, 2).long()
    out = torch.full((experts, rows, k), torch.nan, dtype=torch.float64)
    for thread, r, i, n in itertools.product(range(128), range(2), range(2), range(8)):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        word = words[..., thread, r, i]
        index = word >> 4 * n & 7
        sign = word >> (8 * n + 7 if n < 4 else 8 * (n - 4) + 3) & 1
        f = factors[..., warp * 8 + g, q // 2, r]
        table = torch.stack([torch.zeros_like(f), *(4 * f + entry for entry in (4, 8, 10, 12, 14, 16, 18))], -1)
        byte = table.gather(-1, index[..., None])[..., 0] | sign << 7
        value = byte.byte().view(torch.float8_e5m2).double() * 2.0**-12
        out[:, 16 * warp + 8 * r + g :: 64, 16 * q + 8 * i + n :: 64] = value
    return out * units.row_scales.double()[..., None]


def product(byte: Tensor, f: Tensor, dtype: torch.dtype) -> Tensor:
    """As fp16 the scale is applied to the weight; as FP8 later on, where 2^112 makes up for both their factors."""
    if dtype == torch.float16:
        half = torch.where(byte >= 128, byte - 256, byte) << 8
        return (half.short().view(torch.float16) * (f << 10).short().view(torch.float16)).double()
    weight = byte.byte().view(torch.float8_e5m2).double()
    return weight * (f << 23).int().view(torch.float32).double() * 2.0**112


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, None], ids=["fp16", "fp8", "tables"])
@pytest.mark.parametrize(("rows", "k"), [(64, 64), (128, 192), (96, 160)], ids=["unit", "units", "padded"])
def test_units_hold_the_published_values(rows: int, k: int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(rows)
    blocks = torch.randint(0, 256, (3, rows, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(0, 24, (3, rows, k // 32), dtype=torch.uint8)
    scales += torch.randint(0, 230, (3, rows, 1), dtype=torch.uint8)  # rows differ more than a row's blocks
    scales[:, ::7] = 0
    units = repack(blocks, scales, chunk=2, tables=dtype is None)
    padded = 3, (rows + 63) // 64 * 64, (k + 63) // 64 * 64
    values = unpack(units, *padded, dtype) if dtype else unpack_tables(units, *padded)
    assert torch.equal(values[:, :rows, :k], dequantize(blocks, scales).double())
    assert not values[:, rows:].any()
    assert not values[:, :, k:].any()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, None], ids=["fp16", "fp8", "tables"])
def test_the_smallest_of_very_different_scales_are_rounded(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (1, 64, 64, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (1, 64, 64), dtype=torch.uint8)
    exact = dequantize(blocks, scales).double()
    units = repack(blocks, scales, tables=dtype is None)
    values = unpack(units, 1, 64, 2048, dtype) if dtype else unpack_tables(units, 1, 64, 2048)
    assert (values - exact).abs().max(2).values.le(exact.abs().max(2).values * 2.0**-25).all()


def test_gate_and_up_share_a_thread() -> None:
    order = gate_up_order(40, torch.device("cpu"))
    assert order.numel() == 128
    assert order[:24].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 16, 18, 20, 22, 24, 26, 28, 30]
    assert sorted(order[order >= 0].tolist()) == list(range(80))


def test_rows_of_tables_are_those_of_the_second_products_columns() -> None:
    """Column i is at p(i) of planes.py; whole units are padded."""
    order = gate_up_order(40, torch.device("cpu"), tables=True)
    assert order.numel() == 128
    gates = order.view(8, 2, 8)[:, 0].flatten()
    place = [i & ~60 | (i & 12) << 2 | (i & 48) >> 2 for i in range(64)]
    assert gates[place].tolist() == [2 * i if i < 40 else -1 for i in range(64)]
    ups = order.view(8, 2, 8)[:, 1].flatten()
    assert torch.equal(ups, torch.where(gates < 0, -1, gates + 1))


def test_gate_up_rows_are_reordered() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 2, 16), dtype=torch.uint8)
    scales = torch.randint(105, 129, (2, 64, 2), dtype=torch.uint8)
    order = gate_up_order(32, torch.device("cpu"))
    values = unpack(repack(blocks, scales, order), 2, 64, 64, torch.float16)
    assert torch.equal(values, dequantize(blocks, scales)[:, order].double())


def test_a_scale_that_is_no_number_is_refused() -> None:
    scales = torch.full((1, 64, 2), 120, dtype=torch.uint8)
    scales[0, 3, 1] = 255
    with pytest.raises(ValueError, match="255 is no number"):
        repack(torch.zeros(1, 64, 2, 16, dtype=torch.uint8), scales)


def interpret_kernels() -> None:
    blocks = torch.randint(0, 256, (2, 128, 10, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = hopper_repack._place_nibbles(hopper_repack.words_kernel, blocks, hopper_repack._byte_tables(blocks.device))
    assert torch.equal(words, hopper_repack._nibbles(blocks))
    tables = hopper_repack._place_nibbles(hopper_repack.tables_kernel, blocks.view(torch.int32))
    assert torch.equal(tables, hopper_repack._table_nibbles(blocks))


def test_kernels_place_nibbles_as_torch_does() -> None:
    run_interpreted(interpret_kernels)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["words", "tables"])
def test_kernels_that_place_nibbles_take_few_registers(name: str) -> None:
    given = {"blocks_ptr": "*u8", "byte_tables_ptr": "*i64", "out_ptr": "*i64"}
    if name == "tables":
        given = {"blocks_ptr": "*i32", "out_ptr": "*i32"}
    kernel = getattr(hopper_repack, f"{name}_kernel")
    compiled = compile_ahead(kernel, given | {"units": "i32"}, {"UNITS": hopper_repack.UNITS}, num_warps=4)
    assert compiled.registers <= 128


@pytest.mark.hopper
@pytest.mark.parametrize("tables", [False, True])
def test_a_gpu_has_the_same_units(tables: bool) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (9, 192, 45, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (9, 192, 45), dtype=torch.uint8)
    order = gate_up_order(96, torch.device("cpu"), tables=tables)
    expected = repack(blocks, scales, order, tables=tables)
    found = repack(blocks.cuda(), scales.cuda(), order.cuda(), tables=tables)
    for name in ("nibbles", "scales", "row_scales"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_published_widths_are_not_padded() -> None:
    """The bytes of one expert are not padded: the memory plan of a small GPU has no room for that."""
    experts = random_experts(1, 2880, 2880, torch.device("cpu"), torch.bfloat16, scales=(118, 122))
    published = experts.gate_up_blocks, experts.gate_up_scales, experts.down_blocks, experts.down_scales
    hopper, cpu = prepare_experts(CPU_TARGET, experts), native.prepare_experts(experts)
    units = hopper.gate_up.nibbles, hopper.gate_up.scales, hopper.down.nibbles, hopper.down.scales
    for repacked in (units, (cpu.gate_up, cpu.down)):
        assert sum(part.nbytes for part in repacked) == sum(part.nbytes for part in published)
