"""The preparation of a step, against loops over its tokens; the Triton kernels compiled, interpreted and on a GPU."""

import pytest
import torch
from torch import Tensor

from oscine.ops.native.library import unavailable
from oscine.ops.packed import BatchState, PackedSizes, PackedStep
from oscine.ops.step import native, reference

from .compile_ahead import compile_ahead, run_interpreted

CASES = [  # tokens of each sequence, rows wanted, columns of the tables
    ([1], 1, 1),
    ([1, 1, 1], 3, 5),
    ([1, 700, 1, 3], 2, 300),
    ([5], 0, 256),
    ([1] * 300, 300, 3),
]
P = 16


def case(lengths: list[int], num_rows: int, columns: int, device: str) -> tuple[PackedStep[Tensor], BatchState]:
    generator = torch.Generator().manual_seed(len(lengths) + columns)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    slots, count, tokens = len(lengths) + 3, len(lengths), sum(lengths)
    sizes = PackedSizes(tokens, count, num_rows, count)
    flat = torch.full((sizes.total,), -7, dtype=torch.int32)
    packed = PackedStep.of(flat, sizes)
    packed.slots_S[:] = torch.randperm(slots, generator=generator)[:count]
    packed.token_slots_T[:] = packed.slots_S.repeat_interleave(torch.tensor(lengths))
    packed.given_T[:] = draw(50, tokens) * draw(2, tokens) - 1
    packed.positions_T[:] = draw(columns * P, tokens)
    packed.logits_rows_N[:] = draw(tokens, num_rows)
    packed.sampled_slots_M[:] = packed.slots_S
    on_device = PackedStep.of(flat.to(device), sizes)
    tables = draw(10_000_000, 1 + count % 3, slots, columns).to(device)  # of one group, or of several
    return on_device, BatchState(tables, draw(50, slots + 1).to(device), P)


def check(prepare: object, write_back: object, device: str) -> None:
    for lengths, num_rows, columns in CASES:
        packed, state = case(lengths, num_rows, columns, device)
        before = state.last_ids.clone()
        prepared = prepare(packed, state)  # type: ignore[operator]
        for group, table in zip(prepared.groups, state.tables, strict=True):
            assert torch.equal(group.page_table_SB, table[packed.slots_S.long()])
            assert group.page_table_SB.dtype == torch.int32
            assert group.slots_T.tolist() == [
                table[s, p // P].item() * P + p % P
                for s, p in zip(packed.token_slots_T.tolist(), packed.positions_T.tolist(), strict=True)
            ]
        assert prepared.token_ids_T.tolist() == [
            before[s].item() if g < 0 else g
            for s, g in zip(packed.token_slots_T.tolist(), packed.given_T.tolist(), strict=True)
        ]
        assert torch.equal(prepared.positions_T, packed.positions_T.long())
        assert torch.equal(prepared.logits_rows_N, packed.logits_rows_N.long())
        for dtype in (torch.int64, torch.int32):
            ids = torch.arange(len(lengths), device=device, dtype=dtype) + 1000
            write_back(state, packed.sampled_slots_M, ids)  # type: ignore[operator]
            assert torch.equal(state.last_ids[packed.slots_S.long()].long(), ids.long())
        write_back(state, packed.sampled_slots_M, torch.full_like(packed.sampled_slots_M, -1))  # type: ignore[operator]
        assert not state.last_ids[packed.slots_S.long()].any(), "what is no token is written back as one"
        others = torch.ones_like(before, dtype=torch.bool)
        others[packed.slots_S.long()] = False
        assert torch.equal(state.last_ids[others], before[others])


def test_the_definition() -> None:
    check(reference.prepare_step, reference.write_back, "cpu")


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_the_native_kernels() -> None:
    check(native.prepare_step, native.write_back, "cpu")


def interpreted() -> None:
    from oscine.ops.step import triton as kernels

    check(kernels.prepare_step, kernels.write_back, "cpu")


def test_the_kernels_interpreted() -> None:
    run_interpreted(interpreted)


def test_the_kernels_compile_for_a_gpu() -> None:
    from oscine.ops.step import triton as kernels

    integers = ("packed", "last_ids", "state_tables", "tables")
    types = dict.fromkeys(integers, "*i32") | {"wide": "*i64"}
    counts = dict.fromkeys(
        (
            "num_tokens",
            "num_sequences",
            "num_rows",
            "stride",
            "slots_start",
            "rows_start",
            "token_blocks",
            "stride_group",
        ),
        "i32",
    )
    constants = {"GROUPS": 2, "P": 64, "B": 2048, "BLOCK": kernels.BLOCK}
    assert not compile_ahead(kernels._prepare_kernel, types | counts, constants).spills
    types = {"last_ids": "*i32", "slots_M": "*i32", "ids_M": "*i64", "count": "i32"}
    compile_ahead(kernels._write_back_kernel, types, {"BLOCK": kernels.BLOCK}, unaligned=("ids_M",))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    from oscine.ops.step import triton as kernels

    check(kernels.prepare_step, kernels.write_back, "cuda")
    check(reference.prepare_step, reference.write_back, "cuda")
