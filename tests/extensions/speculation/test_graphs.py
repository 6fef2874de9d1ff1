"""Steps with drafts, and steps that a head follows, as CUDA graphs: on a GPU, and recorded without one."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.engine.core.extension import EngineExtension
from oscine.engine.core.request import Request
from oscine.executor.sampling.masks import GrammarCache
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep
from oscine.timing.kinds import GraphSizes
from oscine.types import NewSequence, StepPlan
from tests.engine.harness import SomeDrafts
from tests.executor.conftest import MakeExecutor
from tests.executor.grammars import tokenizer_file
from tests.executor.recorded import record_graphs
from tests.executor.test_headers import SPECIALS
from tests.executor.tiny import capturable_model, executor, loop, model, naive_greedy, options, prompt, request, run
from tests.tiny import TINY

from .drafting import on_device, on_host
from .test_host_drafts import MOST, Remembered, facts, workload

GRAPHS = (1, 2, 4, 6)


class Counted:
    """A DeviceDrafter that counts the steps that it follows, in replays of graphs too. Its drafts are all 0."""

    aux_layers = (1,)

    def __init__(self, device: torch.device) -> None:
        self.num_followed = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_drafted = 0

    def assign(self, new: NewSequence) -> None: ...

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        return 2 * streams[1]

    def follow(self, packed: object, batch: object, features_TH: Tensor, ids_M: Tensor) -> None:
        self.num_followed.add_(1)

    def follow_any(self, *arguments: object) -> None:
        self.num_followed.add_(1)

    def draft(self, slots_D: object, counts_D: NDArray[np.int64], last_places_D: object) -> None:
        self.num_drafted += int(counts_D.sum())

    def capture(self, sizes: list[int], most_drafts: int) -> None: ...


class Alternating(EngineExtension):
    """Two drafts for each request in some steps, and none in others."""

    def __init__(self) -> None:
        self.num_steps = 0

    def before_step(self, running: Collection[Request]) -> None:
        self.num_steps += 1
        for one in running:
            one.num_drafts = 2 * (self.num_steps // 3 % 2)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"], ids=["cuda", "recorded"])
def test_steps_without_drafts_have_graphs_that_no_head_follows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        record_graphs(monkeypatch)
    asked = options(max_num_seqs=6)
    drafter = Counted(torch.device(device))
    runner = executor(
        capturable_model(torch.device(device)), asked, 64, 64, make_drafts=on_device(drafter, 2), max_drafts=2
    )
    runner.graphs.run_eagerly(GraphSizes((*GRAPHS, 12, 18)))
    runner.graphs.capture(GraphSizes((*GRAPHS, 12, 18)))
    runner.forget_page_zero()
    drafter.num_followed.zero_()
    plans: list[StepPlan] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: (plans.append(plan), launch(plan)))
    running = loop(runner, asked, runner.memory, Alternating())
    requests = [request(str(n), prompt(n), max_tokens=30) for n in (3, 17, 29, 40)]
    found = run(running, *requests)
    for one in requests:
        assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 30)
    for_head = [plan.new or any(s.num_drafts or s.num_tokens > 1 for s in plan.sequences) for plan in plans]
    assert int(drafter.num_followed) == sum(map(bool, for_head))
    assert drafter.num_drafted > 20
    assert for_head.count(False) > 8


@dataclass
class Told:
    """A DeviceDrafter that notes what it is told."""

    aux_layers: tuple[int, ...] = (1,)
    calls: list[list[Tensor]] = field(default_factory=list)

    def assign(self, new: NewSequence) -> None: ...

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        return 2 * streams[1]

    def follow(self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor) -> None:
        raise AssertionError("no graphs of decodes")

    def follow_any(
        self,
        packed: PackedStep[Tensor],
        batch: Batch,
        features_TH: Tensor,
        ids_M: Tensor | None,
        known_S: NDArray[np.int32],
    ) -> None:
        assert batch.logits_rows_N is not None
        told = [
            *packed._replace(counts_2=packed.slots_S),
            batch.token_ids_T,
            batch.positions_T,
            batch.query_starts_S1,
            batch.context_lens_S,
        ]
        told += [batch.logits_rows_N, features_TH, torch.from_numpy(known_S)]
        told += [tensor for group in batch.groups for tensor in (group.page_table_SB, group.slots_T)]
        self.calls.append([tensor.cpu().clone() for tensor in (*told, *([] if ids_M is None else [ids_M]))])

    def draft(self, *arguments: object) -> None:
        raise AssertionError("no drafts")

    def capture(self, sizes: list[int], most_drafts: int) -> None: ...


def test_a_draft_head_is_told_what_it_is_told_of_eager_steps(make_executor: MakeExecutor) -> None:
    told, expected = Told(), Told()
    graphs = make_executor(make_drafts=on_device(told, 1))
    told.calls.clear()  # of the capture
    eager = executor(
        capturable_model(graphs.device), options(max_num_seqs=6), 64, 64, make_drafts=on_device(expected, 1)
    )
    for runner in (graphs, eager):
        asked = options(max_num_seqs=6, max_num_batched_tokens=30)
        run(loop(runner, asked, runner.memory), *(request(str(n), prompt(n), max_tokens=4) for n in (3, 17, 29, 70)))
    for one, other in zip(told.calls, expected.calls, strict=True):
        for tensor, same in zip(one, other, strict=True):
            torch.testing.assert_close(tensor, same, rtol=1e-4, atol=1e-5)
    assert len(told.calls) > 3


@pytest.mark.long
@pytest.mark.parametrize("pages", [64, 10])
def test_drafts_beside_prompts(
    make_executor: MakeExecutor,
    replayed: list[tuple[int, int]],
    tmp_path_factory: pytest.TempPathFactory,
    pages: int,
) -> None:
    """Also with grammars, penalties and log-probabilities."""
    grammars = GrammarCache(tokenizer_file(tmp_path_factory.mktemp("tokenizer"), SPECIALS), TINY.vocab_size)
    asked, requests = options(max_num_batched_tokens=48), workload()
    plain = executor(model(), asked, 64, 64, grammars)
    expected = run(loop(plain, asked, plain.memory), *requests)
    drafter = Remembered({tuple(one.prompt_token_ids): expected[one.request_id].token_ids for one in requests})
    runner = make_executor(
        slots=4, room=4 * (1 + MOST), pages=pages, grammars=grammars, make_drafts=on_host(drafter), max_drafts=MOST
    )
    running = loop(runner, asked, runner.memory, SomeDrafts(MOST))
    found = run(running, *requests)
    for name, output in expected.items():
        assert facts(found[name]) == facts(output), name
    assert (running.stats().preemptions > 0) == (pages < 64)
    assert len(replayed) > 20
    assert drafter.num_drafts > 200
