"""Engines in processes of their own that share the requests of a load: `oscine bench engine --data-parallel-size N`.

A question is a pass, and its answer has the times.
"""

import atexit
import gc
import json
import select
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oscine.engine.build import build_engine
from oscine.extensions.bench.forks import Answer, ForkError, Forks, line
from oscine.extensions.bench.passes import Limits, MeasureError, OwnEngine, Timing
from oscine.extensions.bench.result import Point
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.settings.config import EngineOptions
from oscine.types import RankHandle


class EngineProcesses:
    """Make it before this process uses a GPU or starts threads."""

    def __init__(self, options: Sequence[EngineOptions], *, share_experts: bool) -> None:
        """Returns when all engines are ready. Raises ValueError for what a user can mend, else MeasureError."""
        rendezvous, count = Rendezvous(len(options)) if share_experts else None, len(options)
        self._forks = Forks(
            (
                partial(_serve, own, rank, count, None if rendezvous is None else rendezvous.handle(rank))
                for rank, own in enumerate(options)
            ),
            _failure,
        )
        atexit.register(self.close)  # waits until their memory is free
        try:
            ready = self._forks.answers()
        except ForkError as error:
            raise self._failed(error) from None
        except BaseException:
            self.close()
            raise
        self.model = str(ready[0]["model"])
        self.gpus: Sequence[str] = [gpu for one in ready for gpu in one["gpus"]]
        self.limits = Limits(*map(min, zip(*(one["limits"] for one in ready), strict=True)))

    def prepare(self, point: Point) -> None:
        self._ask(replace(point, osl=0))

    def run(self, point: Point) -> Timing:
        passes = self._ask(point)
        began_s = min(one["began_s"] for one in passes)
        full_s, first_s = (max(one["began_s"] + one[name] for one in passes) for name in ("full_s", "first_s"))
        return Timing(full_s - began_s, first_s - began_s)

    def num_held(self, point: Point) -> int:
        return sum(one["num_held"] for one in self._ask(replace(point, concurrency=0)))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._forks.close()

    def _ask(self, point: Point) -> list[Answer]:
        """Raises what the first one that fails says."""
        try:
            return self._forks.ask([point.concurrency, point.isl, point.osl])
        except ForkError as error:
            raise self._failed(error) from None

    def _failed(self, error: ForkError) -> Exception:
        self.close()
        if error.answer.get("is_users"):
            return ValueError(str(error))
        return MeasureError(f"engine {error.place}: {error}")


def _failure(error: BaseException) -> Answer:
    is_users = isinstance(error, ValueError | OSError)
    if not is_users:
        traceback.print_exc()
    return {"error": str(error) or type(error).__name__, "is_users": is_users}


def _serve(
    options: EngineOptions, rank: int, num_engines: int, handle: RankHandle | None, asked: socket.socket
) -> None:
    """Takes part in the steps of the others between its own passes."""
    if options.num_threads is not None:
        import torch

        torch.set_num_threads(options.num_threads)
    built = build_engine(options, handle)
    engine = OwnEngine(built, share=rank, num_shares=num_engines)
    gc.collect()
    gc.freeze()  # as the engine process does
    asked.sendall(line({"model": engine.model, "gpus": engine.gpus, "limits": engine.limits}))
    loop, lines = built.loop, asked.makefile("rb")
    waiting: list[Any] = [asked, *(one for extension in loop.extensions if (one := extension.fileno()) is not None)]
    while True:
        if select.select([asked], [], [], 0)[0]:
            if not (text := lines.readline()):
                return
            asked.sendall(line(_pass(engine, Point(*json.loads(text)))))
        elif loop.has_work:
            loop.step()
        else:
            select.select(waiting, [], [])


def _pass(engine: OwnEngine, point: Point) -> dict[str, float]:
    """Without requests, how many run at once. Without tokens to generate, only the prompts are made."""
    if not point.concurrency:
        return {"num_held": engine.num_held(point)}
    engine.prepare(point)
    if not point.osl:
        return {}
    began_s = time.perf_counter()
    timing = engine.run(point)
    return {"began_s": began_s, "full_s": timing.full_s, "first_s": timing.first_s}
