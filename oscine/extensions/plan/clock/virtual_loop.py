"""An event loop of asyncio whose time is that of an agenda: it never waits, but moves on to what comes next."""

import asyncio
import selectors
from collections.abc import Callable
from math import ceil
from typing import Any

from oscine.extensions.plan.clock.agenda import NEVER, NS, Agenda


class _Selector(selectors.SelectSelector):
    """Where an event loop would wait, entries of the agenda are done, until one of them gives the loop some work."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self.agenda, self.has_work = agenda, False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        agenda = self.agenda
        if timeout is not None and timeout <= 0:
            return []
        agenda.timer_ns = NEVER if timeout is None else agenda.clock.ns + ceil(timeout / NS)
        self.has_work = False
        while not self.has_work:
            if agenda.next_ns <= agenda.timer_ns < NEVER or agenda.next_ns < NEVER == agenda.timer_ns:
                agenda.advance()
            elif agenda.timer_ns == NEVER:
                raise RuntimeError("something is awaited, and nothing will ever happen")
            else:
                agenda.clock.ns = agenda.timer_ns
                break
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, agenda: Agenda) -> None:
        self._clock, self._waiting = agenda.clock, _Selector(agenda)
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._clock()

    def call_soon(self, callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        self._waiting.has_work = True
        return super().call_soon(callback, *args, **options)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, **options: Any
    ) -> asyncio.TimerHandle:
        self._waiting.has_work = True
        return super().call_at(when, callback, *args, **options)
