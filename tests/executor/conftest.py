"""Executors whose steps with prompts are CUDA graphs: on a GPU, and recorded without one."""

from collections.abc import Callable, Sequence

import pytest
import torch

from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.cuda_graphs import PromptGraphs
from oscine.executor.runner import TorchExecutor
from oscine.timing.kinds import GraphSizes

from .recorded import record_graphs
from .tiny import capturable_model, executor, options

SIZES = (8, 16, 32, 64)  # tokens
MakeExecutor = Callable[..., TorchExecutor]


def with_graphs(
    device: str, slots: int = 6, sizes: Sequence[int] = SIZES, pages: int = 64, room: int = 0, **others: object
) -> TorchExecutor:
    asked, graphs = options(max_num_seqs=slots), capturable_model(torch.device(device))
    runner = executor(graphs, asked, pages, pages, **others)  # type: ignore[arg-type]
    graph_sizes = GraphSizes(prompts=tuple(sizes), room=room or slots)
    runner.graphs.run_eagerly(graph_sizes)
    runner.graphs.capture(graph_sizes)
    runner.forget_page_zero()
    return runner


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"], ids=["cuda", "recorded"])
def make_executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    if request.param == "cpu":
        record_graphs(monkeypatch)
    return lambda **others: with_graphs(request.param, **others)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, size) of each replay."""
    found: list[tuple[int, int]] = []
    replay = PromptGraphs.replay

    def noted(self: PromptGraphs, step: StepArrays, slots: object, size: int) -> object:
        found.append((step.num_tokens, size))
        return replay(self, step, slots, size)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptGraphs, "replay", noted)
    return found
