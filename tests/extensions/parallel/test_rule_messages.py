"""What rank 0 says to the other ranks is what they hear."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec", reason="it encodes the messages between processes")

from oscine.executor.sampling.headers import CandidateSet
from oscine.executor.sampling.rules import Masks
from oscine.extensions.parallel.messages import (
    decode_forced,
    decode_plan,
    decode_rules,
    encode_forced,
    encode_plan,
    encode_rules,
)
from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan
from tests.executor.tiny import CPU


def heard(allowed: Masks | CandidateSet | None) -> Masks | CandidateSet | None:
    return decode_rules(bytearray(b"".join(memoryview(part).cast("B") for part in encode_rules(allowed))), CPU)


def test_no_rules() -> None:
    assert heard(None) is None


@pytest.mark.parametrize(("num_masks", "words", "num_rows"), [(1, 1, 1), (3, 6284, 5), (2, 7, 0)])
def test_masks(num_masks: int, words: int, num_rows: int) -> None:
    """6,284 words have a bit for each token of the published vocabulary: more than one page of the ring's head."""
    rng = np.random.default_rng(0)
    masks_KW = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (num_masks, words), np.int32, endpoint=False))
    given = Masks(masks_KW, rng.integers(0, num_masks, num_rows, np.int32))
    found = heard(given)
    assert isinstance(found, Masks)
    assert torch.equal(found.masks_KW, given.masks_KW)
    assert (found.row_N == given.row_N).all()
    assert found.row_N.dtype == given.row_N.dtype


@pytest.mark.parametrize(("num_rows", "most"), [(1, 1), (4, 9)])
def test_few(num_rows: int, most: int) -> None:
    ids_KA = np.arange(num_rows * most, dtype=np.int64).reshape(num_rows, most) * 50_000 - 1
    given = CandidateSet(np.arange(num_rows, dtype=np.int64) * 2, ids_KA)
    found = heard(given)
    assert isinstance(found, CandidateSet)
    assert (found.ids_KA == ids_KA).all()
    assert (found.rows_K == given.rows_K).all()
    assert found.ids_KA.shape == ids_KA.shape


@pytest.mark.parametrize("forced", [[], [[]], [[201_087], [], [5, 0]]])
def test_forced_tokens(forced: list[list[int]]) -> None:
    assert decode_forced(bytearray(encode_forced(forced))) == forced


def test_a_plan_with_everything_in_it() -> None:
    sampling = SamplingParams(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=3, min_p=0.1, seed=(1 << 63) - 1, logit_bias={3: -1.5},
        stop_token_ids=(1, 2), grammar="start: /a/", logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    new = [
        NewSequence(2, [5, 6, 7], 3, 0, [[], []], sampling),
        NewSequence(0, [1], 1, 64, [[4], []], replace(sampling, seed=0)),
    ]
    sequences = [ScheduledSequence(2, 0, 3, True, [[9], [8]]), ScheduledSequence(0, 64, 1, False, [[], []])]
    plan = StepPlan(7, new, sequences)
    assert decode_plan(encode_plan(plan)) == plan
