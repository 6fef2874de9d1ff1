"""The benchmark of drafts that decides itself which are accepted: as often as it was told to."""

import pytest
import torch
from torch import Tensor

from benchmarks.draft import Compared, Job, Measured, measure, rates, summary
from benchmarks.draft_head import forced
from oscine.checkpoint.opened import OpenedModel
from oscine.extensions.speculation.eagle.find import OF_NANO
from oscine.ops.interface import Batch
from oscine.ops.packed import REJECTED, BatchState, PackedSizes, PackedStep
from oscine.ops.step.reference import accept

SEQUENCES, DRAFTS = 4000, 3


def accepted(chances: list[float], sampled: str) -> Tensor:
    """[sequences, drafts]: which drafts are accepted of sequences that sampled all drafts, or none of them."""
    rows = SEQUENCES * (1 + DRAFTS)
    sizes = PackedSizes(rows, SEQUENCES, rows, rows)
    packed = PackedStep.of(torch.zeros(sizes.total, dtype=torch.int32), sizes)
    place, sequence = torch.arange(rows) % (1 + DRAFTS), torch.arange(rows) // (1 + DRAFTS)
    packed.given_T[:], packed.logits_rows_N[:], packed.sampled_slots_M[:] = -1 - place, torch.arange(rows), sequence
    tokens, empty = torch.arange(rows) + 10, torch.empty(0)
    batch = Batch(tokens, place + sequence % 50, empty, empty, (), None)
    ids = tokens.roll(-1) if sampled == "all" else torch.zeros(rows, dtype=torch.int64)
    columns = (torch.zeros(SEQUENCES + 1, dtype=torch.int32) for _ in range(2))
    state = BatchState(empty, *columns, drafts=torch.zeros(SEQUENCES + 1, DRAFTS, dtype=torch.int32), page_size=64)
    kept = accept(packed, batch, state, forced(packed, batch, ids, torch.tensor([*chances, 0.0])))
    return (kept != REJECTED).view(SEQUENCES, -1)[:, 1:]


@pytest.mark.long
@pytest.mark.parametrize("sampled", ["all", "none"])
def test_drafts_are_accepted_as_often_as_asked(sampled: str) -> None:
    found = accepted([0.73, 0.52 / 0.73, 0.36 / 0.52], sampled).float().mean(0)
    torch.testing.assert_close(found, torch.tensor([0.73, 0.52, 0.36]), atol=0.025, rtol=0)  # three deviations


@pytest.mark.parametrize("sampled", ["all", "none"])
def test_all_or_nothing(sampled: str) -> None:
    assert accepted([1.0] * 3, sampled).all()
    assert not accepted([0.0] * 3, sampled).any()


@pytest.mark.parametrize("text", ["73,52", "52,73,36", "110,50,20", "73,52,0"])
def test_rates_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="3 percentages"):
        rates(text)
    assert rates("73,52,36") == (0.73, 0.52, 0.36)


@pytest.mark.long
def test_both_engines_have_the_weights_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, load = [], OpenedModel.load
    monkeypatch.setattr(OpenedModel, "load", lambda *args, **how: loads.append(load(*args, **how)) or loads[-1])
    shape = {"isl": 16, "osl": 8, "rounds": 2, "step_tokens": 1024, "one_engine": False}
    job = Job("nano", "cpu", (0, 2), str(OF_NANO), (), (1, 2), **shape)
    found = measure(job)
    assert len(loads) == 1
    assert [(one.concurrency, one.k) for one in found] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(len(one.ratios) == 2 for one in found)
    assert all(passed.acceptance_length == 1 for one in found for passed in one.plain)
    assert all(passed.acceptance_length == 1 for one in found for passed in one.drafting if one.k == 0)


def test_the_controller_is_compared_with_the_best_fixed_number() -> None:
    def compared(forced: tuple[float, ...], k: int | None, speed: float) -> Compared:
        return Compared(8, forced, k, [Measured(100.0, 1.0)] * 2, [Measured(speed, 1.0)] * 2)

    low, high = (0.2, 0.1, 0.05), (0.9, 0.8, 0.7)
    speeds: list[tuple[int | None, float]] = [(1, 80.0), (2, 70.0), (None, 99.0)]
    found = [compared(low, 0, 99.5), *(compared(low, *one) for one in speeds), compared(high, 3, 200.0)]
    assert [*summary([*found, compared(high, None, 196.0)])] == [
        "   8 sequences   plain 100.0 tok/s per user   with a head, without drafts 0.995",
        "     synthetic 20%/10%/5%   K 1 0.800  K 2 0.700  controller 0.990, of the best 0.990",
        "     synthetic 90%/80%/70%  K 3 2.000  controller 1.960, of the best 0.980",
    ]
