"""The preparation and the end of a step, against loops over its tokens; the Triton kernels compiled, interpreted and on
a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oscine.ops.interface import Batch
from oscine.ops.native.library import unavailable
from oscine.ops.packed import REJECTED, BatchState, PackedSizes, PackedStep
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
DRAFTS = 3


def draw(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)


def new_state(generator: torch.Generator, slots: int, columns: int, groups: int, device: str) -> BatchState:
    tables = draw(generator, 10_000_000, groups, slots, columns)
    lens = 1 + draw(generator, columns * P - DRAFTS, slots + 1)
    columns_of_state = tables, draw(generator, 50, slots + 1), lens, draw(generator, 50, slots + 1, DRAFTS)
    return BatchState(*(column.to(device) for column in columns_of_state), P)


def case(lengths: list[int], num_rows: int, columns: int, device: str) -> tuple[PackedStep[Tensor], BatchState]:
    generator = torch.Generator().manual_seed(len(lengths) + columns)
    slots, count, tokens = len(lengths) + 3, len(lengths), sum(lengths)
    sizes = PackedSizes(tokens, count, num_rows, count)
    flat = torch.full((sizes.total,), -7, dtype=torch.int32)
    packed = PackedStep.of(flat, sizes)
    packed.slots_S[:] = torch.randperm(slots, generator=generator)[:count]
    packed.token_slots_T[:] = packed.slots_S.repeat_interleave(torch.tensor(lengths))
    packed.given_T[:] = draw(generator, 50 + 1 + DRAFTS, tokens) - 1 - DRAFTS
    packed.positions_T[:] = draw(generator, columns * P, tokens)
    packed.query_starts_S1[:] = torch.tensor([0, *lengths]).cumsum(0)
    packed.logits_rows_N[:] = draw(generator, tokens, num_rows)
    packed.sampled_slots_M[:] = packed.slots_S
    state = new_state(generator, slots, columns, 1 + count % 3, device)  # of one group, or of several
    return PackedStep.of(flat.to(device), sizes), state


Prepare = Callable[[PackedStep[Tensor], BatchState], object]
Accept = Callable[[PackedStep[Tensor], Batch, BatchState, Tensor], Tensor]


def check_prepare(prepare: Prepare, device: str) -> None:
    for lengths, num_rows, columns in CASES:
        packed, state = case(lengths, num_rows, columns, device)
        prepared = prepare(packed, state)
        last, lens, drafts = state.last_ids.tolist(), state.lens.tolist(), state.drafts.tolist()
        ids, positions = [], []
        for given, position, slot in zip(*(column.tolist() for column in packed[:3]), strict=True):
            ids.append(given if given >= 0 else [last[slot], *drafts[slot]][-1 - given])
            positions.append(position if given >= 0 else lens[slot] - 1 + (-1 - given))
        assert prepared.token_ids_T.tolist() == ids  # type: ignore[attr-defined]
        assert prepared.positions_T.tolist() == positions  # type: ignore[attr-defined]
        ends = [positions[end - 1] + 1 for end in packed.query_starts_S1.tolist()[1:]]
        assert prepared.context_lens_S.tolist() == ends  # type: ignore[attr-defined]
        assert prepared.context_lens_S.dtype == torch.int32  # type: ignore[attr-defined]
        for group, table in zip(prepared.groups, state.tables, strict=True):  # type: ignore[attr-defined]
            for row, slot, end in zip(group.page_table_SB, packed.slots_S.tolist(), ends, strict=True):
                used = -(-end // P)  # later columns may be anything
                assert torch.equal(row[:used], table[slot, :used])
            assert group.page_table_SB.dtype == torch.int32
            assert group.slots_T.tolist() == [
                table[s, p // P].item() * P + p % P
                for s, p in zip(packed.token_slots_T.tolist(), positions, strict=True)
            ]
        assert torch.equal(prepared.logits_rows_N, packed.logits_rows_N.long())  # type: ignore[attr-defined]


def check_accept(accept: Accept, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for num_sequences in (1, 2, 7, 300):
        for vocab in (2, 3, 12):  # few ids, so that drafts are accepted
            check_step(accept, generator, num_sequences, vocab, device)


def check_step(accept: Accept, generator: torch.Generator, num_sequences: int, vocab: int, device: str) -> None:
    """Decodes with drafts, then prompts of two tokens that sample after the second, then padding."""
    drafted = draw(generator, DRAFTS + 1, num_sequences).tolist()
    prompts, padding = 2, 3
    decodes = sum(1 + k for k in drafted)
    tokens, rows = decodes + 2 * prompts + padding, decodes + prompts + padding
    flat = torch.zeros(PackedSizes(tokens, rows, rows, rows).total, dtype=torch.int32)
    packed = PackedStep.of(flat, PackedSizes(tokens, rows, rows, rows))
    slots = num_sequences + prompts
    state = new_state(generator, slots, 4, 1, device)
    given = [-1 - j for k in drafted for j in range(k + 1)] + [5] * 2 * prompts + [-1] * padding
    packed.given_T[:] = torch.tensor(given)
    wanted = [*range(decodes), *range(decodes + 1, decodes + 2 * prompts, 2), *range(decodes + 2 * prompts, tokens)]
    packed.logits_rows_N[:] = torch.tensor(wanted)
    owners = [s for s, k in enumerate(drafted) for _ in range(k + 1)] + [num_sequences, num_sequences + 1]
    packed.sampled_slots_M[:] = torch.tensor(owners + [slots] * padding)
    token_ids, positions = draw(generator, vocab, tokens).long(), draw(generator, 60, tokens).long()
    ids = draw(generator, vocab, rows) - 1
    last, lens = state.last_ids.tolist(), state.lens.tolist()
    expected: list[int] = []
    for m, row in enumerate(wanted):
        before = expected[-1] if m else -1
        follows = given[row] < -1 and before == token_ids[row] and before >= 0
        expected.append(int(ids[m]) if given[row] >= -1 or follows else REJECTED)
        if expected[-1] != REJECTED and m < len(owners):
            last[owners[m]], lens[owners[m]] = max(int(ids[m]), 0), int(positions[row]) + 2
    on_device = PackedStep.of(flat.to(device), PackedSizes(tokens, rows, rows, rows))
    empty = torch.empty(0, device=device)
    batch = Batch(token_ids.to(device), positions.to(device), empty, empty, (), None)
    for dtype in (torch.int64, torch.int32):
        found = accept(on_device, batch, state, ids.to(device, dtype))
        assert found.tolist() == expected
        assert found.dtype == torch.int64
        assert (state.last_ids.tolist(), state.lens.tolist()) == (last, lens)
    assert REJECTED in expected or num_sequences < 3


def test_the_definition() -> None:
    check_prepare(reference.prepare_step, "cpu")
    check_accept(reference.accept, "cpu")


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_the_native_kernels() -> None:
    check_prepare(native.prepare_step, "cpu")
    check_accept(native.accept, "cpu")


def interpreted() -> None:
    from oscine.ops.step import triton as kernels

    check_prepare(kernels.prepare_step, "cpu")
    check_accept(kernels.accept, "cpu")


def test_the_kernels_interpreted() -> None:
    run_interpreted(interpreted)


@pytest.mark.compiles
def test_the_kernels_compile_for_a_gpu() -> None:
    from oscine.ops.step import triton as kernels

    columns = dict.fromkeys(("packed", "last_ids", "lens", "drafts", "state_tables", "tables", "context_lens"), "*i32")
    counts = dict.fromkeys(
        (
            "num_tokens",
            "num_sequences",
            "num_rows",
            "stride",
            "slots_start",
            "query_starts_start",
            "rows_start",
            "token_blocks",
            "stride_group",
        ),
        "i32",
    )
    constants = {"DRAFTS": 8, "GROUPS": 2, "P": 64, "B": 2048, "BLOCK": kernels.BLOCK}
    assert not compile_ahead(kernels._prepare_kernel, columns | {"wide": "*i64"} | counts, constants).spills
    columns = dict.fromkeys(("given_T", "rows_N", "slots_M", "last_ids", "lens"), "*i32")
    wide = dict.fromkeys(("tokens_T", "positions_T", "ids_M", "accepted_M"), "*i64")
    constants = {"DRAFTS": 8, "REJECTED": REJECTED, "BLOCK": kernels.BLOCK}
    types = columns | wide | {"count": "i32", "padding": "i32"}
    assert not compile_ahead(kernels._accept_kernel, types, constants, unaligned=("ids_M",)).spills


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    from oscine.ops.step import triton as kernels

    check_prepare(kernels.prepare_step, "cuda")
    check_accept(kernels.accept, "cuda")
    check_prepare(reference.prepare_step, "cuda")
    check_accept(reference.accept, "cuda")
