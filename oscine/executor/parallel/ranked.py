"""The executor of a model on several ranks, as its rank 0 runs it, and what the other ranks do."""

from oscine.executor.parallel.liveness import RankLostError
from oscine.executor.parallel.messages import decode_plan, encode_plan
from oscine.executor.parallel.processes import RankProcesses
from oscine.executor.parallel.ring import RingReader, RingWriter
from oscine.executor.runner import TorchExecutor
from oscine.ops.target import Communicator
from oscine.types import SamplingParams, StepPlan, StepResult


class RankedExecutor:
    """An Executor over rank 0's own. All ranks run the same plans and choose the same tokens."""

    def __init__(
        self, executor: TorchExecutor, ranks: RankProcesses, plans: RingWriter, communicator: Communicator
    ) -> None:
        self._executor, self._ranks, self._plans, self._communicator = executor, ranks, plans, communicator

    def prepare(self, sampling: SamplingParams) -> bool:
        return self._executor.prepare(sampling)

    def launch(self, plan: StepPlan) -> None:
        self._ranks.check()
        self._plans.send(encode_plan(plan))
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        return _collect(self._executor, self._communicator)


def follow(executor: TorchExecutor, plans: RingReader, communicator: Communicator) -> None:
    """Runs the plans of rank 0 until it is stopped. A step is collected while the one after it runs."""
    executor.launch(decode_plan(plans.receive()))
    while True:
        executor.launch(decode_plan(plans.receive()))
        _collect(executor, communicator)


def _collect(executor: TorchExecutor, communicator: Communicator) -> StepResult:
    result = executor.collect()
    if communicator.error is not None:
        raise RankLostError(communicator.error)
    return result
