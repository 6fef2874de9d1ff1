"""A rank that cannot start, or that fails in a step, fails the engine with its reason. Nothing is left."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from oscine.engine.build import build_engine
from oscine.engine.core.offline import generate
from oscine.extensions.parallel.comm.collectives import CollectiveCommunicator
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions
from oscine.types import GenerationRequest, RankLostError, SamplingParams
from tests.children import children, shared_files
from tests.waiting import wait_until

OPTIONS = EngineOptions(
    ModelOptions(device="cpu", tensor_parallel_size=2), CacheOptions(kv_cache_bytes=1 << 24), quiet=True
)
REQUEST = GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=100))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    shared, threads = shared_files([psutil.Process()]), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    wait_until(lambda: not ranks(), "no ranks")
    assert shared_files([psutil.Process()]) == shared


def ranks() -> list[psutil.Process]:
    return children("oscine.extensions.parallel.start.rank")


def fails(patch: pytest.MonkeyPatch, when: str) -> None:
    patch.setattr("oscine.extensions.parallel.processes.RANK", "tests.extensions.parallel.failing_rank")
    patch.setenv("FAILS", when)


def test_a_rank_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "start")
    with pytest.raises(ValueError, match="no room for the weights"):
        build_engine(OPTIONS)


def test_a_rank_that_ends_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.parallel.processes.RANK", "this")
    with pytest.raises(RankLostError, match=r"rank 1 \(process \d+\) exited with status 0"):
        build_engine(OPTIONS)


def test_a_step_that_fails_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "step")
    engine = build_engine(OPTIONS)
    assert engine.ranks is not None
    with pytest.raises(RankLostError, match=r"rank 1 \(process \d+\): RuntimeError: the step fails"):
        generate(engine.loop, [REQUEST])
    engine.ranks.close()


def test_an_error_names_the_option_for_a_model_that_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "oscine.extensions.parallel.processes.RankProcesses", lambda num_ranks: pytest.fail("ranks were started")
    )
    options = EngineOptions(ModelOptions(device="cpu", tensor_parallel_size=3), quiet=True)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 3: 3 ranks cannot divide a num_attention_heads of 8"):
        build_engine(options)


def test_a_rank_that_ends_is_noticed_while_a_step_waits_for_it() -> None:
    """Kernels of NCCL wait without end. The step of this device is never done; the rank ends at the third look."""
    from oscine.extensions.parallel.ranked import RankedExecutor  # it needs msgspec

    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise RankLostError("rank 1 is gone")

    communicator, adapters = object.__new__(CollectiveCommunicator), SimpleNamespace(host=None)
    executor = SimpleNamespace(communicator=communicator, is_done=False, adapters=adapters)
    processes: Any = SimpleNamespace(watch=lambda: look)
    ranked = RankedExecutor(executor, processes, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        ranked.collect()
    assert looks == [0, 1, 2]
