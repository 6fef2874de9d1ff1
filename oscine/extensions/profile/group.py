"""Engines that share experts, in processes of their own, which run the same steps at the same time.

The first question has the numbers of pages to fill. Each further one is a shape, and its answer has the times.
"""

import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from oscine.executor.start.build import build_executor
from oscine.extensions.bench.forks import Answer, ForkError, Forks, line
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.extensions.profile.grid import Limits, Shape
from oscine.extensions.profile.steps import Steps, Times
from oscine.settings.config import EngineOptions
from oscine.timing.kinds import GraphSizes
from oscine.types import RankHandle


class SharingEngines:
    """Implements Engine for several. Make it before this process uses a GPU or starts threads."""

    def __init__(self, options: Sequence[EngineOptions]) -> None:
        """Raises ValueError if one of them does not start."""
        rendezvous = Rendezvous(len(options))
        self._forks = Forks(
            (partial(_serve, own, rendezvous.handle(rank)) for rank, own in enumerate(options)), _failure
        )
        try:
            ready = self._forks.answers()
        except ForkError as error:
            raise _failed(error) from None
        except BaseException:
            self.close()
            raise
        self.gpus: Sequence[str] = [gpu for one in ready for gpu in one["gpus"]]
        self.model = str(ready[0]["model"])
        limits = [_limits(one["limits"]) for one in ready]
        least = [min(values) for values in zip(*((one.max_num_seqs, *one.pages) for one in limits), strict=True)]
        self.limits = limits[0]._replace(max_num_seqs=least[0], pages=tuple(least[1:]))
        try:
            self.kv_filled = str(self._forks.ask(least[1:])[0]["filled"])
        except ForkError as error:
            raise _failed(error) from None

    def measure(self, shape: Shape, count: int) -> Times:
        """The times of the first; watts of all. Raises ValueError with what the first one says that fails."""
        try:
            answers = self._forks.ask([*shape, count])
        except ForkError as error:
            raise _failed(error) from None
        watts = [one["watts"] for one in answers]
        total = None if None in watts else float(sum(watts))
        return Times(answers[0]["ms"], answers[0]["host_ms"], total)

    def close(self) -> None:
        self._forks.close()


def _failed(error: ForkError) -> ValueError:
    return ValueError(f"engine {error.place}: {error}")


def _limits(values: list[Any]) -> Limits:
    limits = Limits(*values)
    decode, prompts, room = limits.graphs
    graphs = GraphSizes(tuple(decode), tuple(prompts), room)
    return limits._replace(pages=tuple(limits.pages), windows=tuple(limits.windows), graphs=graphs)


def _failure(error: BaseException) -> Answer:
    return {"error": str(error) or type(error).__name__}


def _serve(options: EngineOptions, handle: RankHandle, questions: socket.socket) -> None:
    steps = Steps.of(build_executor(options, handle))
    questions.sendall(line({"gpus": steps.gpus, "limits": steps.limits, "model": steps.built.info.model}))
    lines = questions.makefile("rb")
    questions.sendall(line({"filled": steps.fill(json.loads(next(lines)))}))
    for text in lines:
        *shape, count = json.loads(text)
        questions.sendall(line(steps.measure(Shape(*shape), count)._asdict()))
