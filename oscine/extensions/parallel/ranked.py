"""The executor of a model on several ranks, as its rank 0 runs it, and what the other ranks do."""

import gc
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from oscine.executor.runner import TorchExecutor
from oscine.extensions.parallel.comm.collectives import CollectiveCommunicator
from oscine.extensions.parallel.messages import decode_plan, encode_plan
from oscine.extensions.parallel.processes import RankProcesses
from oscine.extensions.parallel.ring import RingReader, RingWriter
from oscine.types import AdapterChange, RankLostError, SamplingParams, StepPlan, StepResult

_PAUSE_S = 0.00005
_LOOK_S = 1.0  # a kernel waits longer for another rank before it gives up


class RankedExecutor:
    """An Executor over rank 0's own. All ranks run the same plans and choose the same tokens."""

    def __init__(self, executor: TorchExecutor, ranks: RankProcesses, plans: RingWriter) -> None:
        self._executor, self._ranks, self._plans, self._own = executor, ranks, plans, _Own(executor)
        self.adapters = _AdaptersOfAllRanks(executor.adapters.host)

    def prepare(self, sampling: SamplingParams) -> bool:
        return self._executor.prepare(sampling)

    def launch(self, plan: StepPlan) -> None:
        self._ranks.check()
        plan.adapters = self.adapters.changes
        self.adapters.changes = []
        self._plans.send(encode_plan(plan))
        self._own.launch(plan)

    def collect(self) -> StepResult:
        if isinstance(self._executor.communicator, CollectiveCommunicator):
            self._watch()
        return self._own.collect()

    def _watch(self) -> None:
        """Returns when the step is done. Raises RankLostError: NCCL's kernels would wait for a lost rank forever."""
        look = self._ranks.watch()
        while not self._executor.is_done:
            look()
            time.sleep(_PAUSE_S)


class _AdaptersOfAllRanks:
    """The low-rank adapters in host memory: rank 0's own, and the news of them for the other ranks.

    The other ranks hear of a change with the next plan. They read an adapter beside their steps, as rank 0 does.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self.host = None if own is None else self
        self.changes: list[AdapterChange] = []

    def begin(self, number: int, path: str) -> "Future[Any]":
        self.changes.append(AdapterChange(number, path))
        reading: Future[Any] = self._own.begin(number, path)
        return reading

    def drop(self, number: int) -> None:
        self.changes.append(AdapterChange(number, None))
        self._own.drop(number)


def follow(executor: TorchExecutor, plans: RingReader) -> None:
    """Runs the plans of rank 0 until it is stopped. A step is collected while the one after it runs."""
    gc.collect()
    gc.freeze()  # a long collection in one rank would hold up all
    own = _Own(executor)
    own.launch(decode_plan(plans.receive()))
    while True:
        own.launch(decode_plan(plans.receive()))
        own.collect()


class _Own:
    """Steps of one rank. Raises for a step in which it waited for another rank in vain."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._launched_s: deque[float] = deque()
        executor.communicator.serve()

    def launch(self, plan: StepPlan) -> None:
        self._launched_s.append(time.monotonic())
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        took_s = time.monotonic() - self._launched_s.popleft()
        if took_s > _LOOK_S and (error := self._executor.communicator.error) is not None:
            raise RankLostError(error)
        return result
