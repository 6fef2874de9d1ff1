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
        self._agenda, self._has_work = agenda, False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        agenda = self._agenda
        if timeout is not None and timeout <= 0:
            return []
        agenda.timer_ns = NEVER if timeout is None else agenda.clock.ns + ceil(timeout / NS)
        self._has_work = False
        while not self._has_work:
            next_ns = agenda.next_ns
            if next_ns == agenda.timer_ns == NEVER:
                raise RuntimeError("something is awaited, and nothing will ever happen")
            if next_ns > agenda.timer_ns:
                agenda.clock.ns = agenda.timer_ns
                break
            agenda.advance()
        return []

    def note_work(self, ns: int) -> None:
        """The loop has something to do at this time."""
        self._has_work = True
        self._agenda.timer_ns = min(self._agenda.timer_ns, ns)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines and an agenda under one virtual clock."""

    def __init__(self, agenda: Agenda) -> None:
        self._clock, self._selecting = agenda.clock, _Selector(agenda)
        super().__init__(self._selecting)

    def time(self) -> float:
        return self._clock()

    def call_soon(self, callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        self._selecting.note_work(self._clock.ns)
        return super().call_soon(callback, *args, **options)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, **options: Any
    ) -> asyncio.TimerHandle:
        self._selecting.note_work(ceil(when / NS))
        return super().call_at(when, callback, *args, **options)
