"""Plans as packed arrays, against loops over their tokens."""

import itertools

import numpy as np

from oscine.executor.batch.slots import Slots
from oscine.executor.batch.step_arrays import StepArrays, pack
from oscine.executor.kv.limits import sizes_up_to
from oscine.ops.packed import PackedStep
from oscine.types import NewSequence, SamplingParams, ScheduledSequence

SAMPLING = SamplingParams(max_tokens=8)


def new(slot: int, token_ids: list[int], cached_pages: int = 0) -> NewSequence:
    pages = list(range(100 * slot, 100 * slot + cached_pages))
    return NewSequence(slot, token_ids, len(token_ids), 16 * cached_pages, [pages, [-1] * cached_pages], SAMPLING)


def decode(slot: int, start: int, pages: tuple[int, ...] = ()) -> ScheduledSequence:
    return ScheduledSequence(slot, start, 1, True, [list(pages), [page + 50 for page in pages]] if pages else [])


def no_entries() -> list[list[int]]:
    """Of two groups."""
    return [[], [], [], []]


def test_a_step_of_decodes_and_chunks() -> None:
    slots, entries = Slots(4), no_entries()
    for slot, length in ((0, 5), (1, 20), (3, 9)):
        slots.assign(new(slot, [1000 * slot + i for i in range(length)]), entries)
    # Slot 0 is past its prompt, 3 computes the last token of its own, 1 is within its prompt.
    sequences = [decode(0, 7), decode(3, 8), ScheduledSequence(1, 4, 3, False, [])]
    step = StepArrays.of(sequences)
    assert step.num_decodes == 2
    flat, sizes = pack(step, slots, np.array([0, 1]), np.array([0, 3]))
    packed = PackedStep.of(flat, sizes)
    assert flat.dtype == np.int32
    assert len(flat) == sizes.total
    assert packed.given_T.tolist() == [-1, 3008, 1004, 1005, 1006]
    assert packed.positions_T.tolist() == [7, 8, 4, 5, 6]
    assert packed.token_slots_T.tolist() == [0, 3, 1, 1, 1]
    assert packed.slots_S.tolist() == [0, 3, 1]
    assert packed.query_starts_S1.tolist() == [0, 1, 2, 5]
    assert packed.logits_rows_N.tolist() == [0, 1]
    assert packed.sampled_slots_M.tolist() == [0, 3]


def test_padding_repeats_the_first_sequence_and_samples_nothing() -> None:
    slots = Slots(4)
    slots.assign(new(2, [9, 8]), no_entries())
    step = StepArrays.of([decode(2, 1), decode(0, 40)])
    padded = step.padded(4)
    assert padded.samples_S.tolist() == [True, True, False, False]
    packed = PackedStep.of(*pack(padded, slots, np.arange(4), np.where(padded.samples_S, padded.slots_S, 4)))
    assert packed.given_T.tolist() == [8, -1, 8, 8]
    assert packed.positions_T.tolist() == [1, 40, 1, 1]
    assert packed.slots_S.tolist() == packed.token_slots_T.tolist() == [2, 0, 2, 2]
    assert packed.query_starts_S1.tolist() == [0, 1, 2, 3, 4]
    assert packed.sampled_slots_M.tolist() == [2, 0, 4, 4]
    assert step.padded(2).slots_S.tolist() == [2, 0]


def test_padding_leaves_drafts_as_they_are() -> None:
    padded = StepArrays.of([decode(2, 30), decode(0, 40)], [1, 3]).padded(8)
    assert padded.places_S.tolist() == [0, 1, 0, 1, 2, 3, 0, 0]
    packed = PackedStep.of(*pack(padded, Slots(4), np.arange(8), padded.slots_S))
    assert packed.given_T.tolist() == [-1, -2, -1, -2, -3, -4, -1, -1]
    assert packed.token_slots_T.tolist() == [2, 2, 0, 0, 0, 0, 2, 2]


def test_a_filled_step_ends_with_one_sequence_of_padding_and_empty_ones() -> None:
    slots = Slots(4)
    slots.assign(new(1, [5, 6, 7]), no_entries())
    step = StepArrays.of([decode(2, 30), ScheduledSequence(1, 0, 3, True, [])], [1, 0])
    filled = step.filled(8, 6, 3)
    assert filled.samples_S.tolist() == [True, True, True, False, False, False]
    packed = PackedStep.of(*pack(filled, slots, step.sampled_rows, filled.slots_S[:3]))
    assert packed.given_T.tolist() == [-1, -2, 5, 6, 7, -1, -1, -1], "the padding slot's last token"
    assert packed.token_slots_T.tolist() == [2, 2, 1, 1, 1, 3, 3, 3]
    assert packed.slots_S.tolist() == [2, 2, 1, 3, 3, 3]
    assert packed.query_starts_S1.tolist() == [0, 1, 2, 5, 8, 8, 8]
    assert packed.logits_rows_N.tolist() == [0, 1, 4]
    full = step.filled(5, 4, 3)
    assert full.query_starts_S1.tolist() == [0, 1, 2, 5, 5], "without padding"


def test_page_entries_follow_a_slot_from_its_first_column() -> None:
    slots, entries = Slots(3), no_entries()
    slots.assign(new(1, [0] * 40, cached_pages=2), entries)
    slots.extend(decode(1, 39, (7,)), entries)
    slots.extend(decode(1, 41), entries)
    slots.extend(decode(1, 48, (8, 9)), entries)
    assert entries == [[1, 1, 1, 1, 1], [0, 1, 2, 3, 4], [100, 101, 7, 8, 9], [-1, -1, 57, 58, 59]]
    again = no_entries()
    slots.assign(new(1, [0] * 40), again)
    slots.extend(decode(1, 0, (3,)), again)
    assert again == [[1], [0], [3], [53]]


def test_decodes_are_the_leading_single_tokens() -> None:
    chunk = ScheduledSequence(2, 0, 4, False, [])
    for sequences, count in (([chunk], 0), ([decode(0, 1), chunk, decode(1, 1)], 1), ([decode(0, 1)] * 3, 3)):
        assert StepArrays.of(sequences).num_decodes == count


def test_graph_sizes_reach_the_most_and_pad_little() -> None:
    for most in (1, 2, 5, 8, 50, 64, 100, 720, 1024):
        sizes = sizes_up_to(most)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == most
        assert all(b - a <= max(2, a / 2) for a, b in itertools.pairwise(sizes))
    assert len(sizes_up_to(1024)) < 60
