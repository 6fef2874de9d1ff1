"""Clients: they send sessions that begin at given times, or as many users send them one after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.plan.clock.agenda import NS, Agenda, ns_of
from oscine.extensions.plan.fleet.ingress import Ingress
from oscine.extensions.plan.traffic.session import Session


@dataclass(frozen=True, slots=True)
class Traffic:
    """`sessions` has one for each of the times, or as many as users shall begin."""

    sessions: Sequence[Session]
    offsets_ns: Sequence[int] | None = None  # ascending; None: a closed loop
    users: int = 1  # of a closed loop
    think_s: float = 0.0  # from an answer to the next turn

    @property
    def are_independent(self) -> bool:
        """Whether no request waits for the end of another."""
        return self.offsets_ns is not None and all(len(session) == 1 for session in self.sessions)


class Clients:
    """Sends all sessions, and calls `on_end` when the last one has ended. A session ends where a turn fails."""

    def __init__(self, traffic: Traffic, ingress: Ingress, agenda: Agenda, on_end: Callable[[], None]) -> None:
        self.records: list[Record] = []
        self._traffic, self._ingress, self._agenda, self._on_end = traffic, ingress, agenda, on_end
        self._start_ns = agenda.clock.ns
        self._left: Iterator[Session] = iter(traffic.sessions)
        self._num_begun = self._num_ended = 0

    def begin(self) -> None:
        """The load begins now."""
        if self._traffic.offsets_ns is not None:
            self._arrive_next()
        else:
            self._agenda.at(self._start_ns, self._begin_all)

    def _begin_all(self) -> None:
        for _ in range(self._traffic.users):
            self._begin_next()

    def _begin_next(self) -> None:
        """A user begins another session, if there is one."""
        session = next(self._left, None)
        if session is not None:
            self._num_begun += 1
            self._send(session, 0, self._agenda.clock())

    def _arrive_next(self) -> None:
        offsets_ns = self._traffic.offsets_ns
        assert offsets_ns is not None
        if self._num_begun < len(offsets_ns):
            self._agenda.at(self._start_ns + offsets_ns[self._num_begun], self._arrive)

    def _arrive(self) -> None:
        session = next(self._left)
        self._num_begun += 1
        self._arrive_next()
        self._send(session, 0, self._agenda.clock())

    def _send(self, session: Session, turn: int, due_s: float) -> None:
        self._ingress.submit(session[turn], due_s, partial(self._answered, session, turn))

    def _answered(self, session: Session, turn: int, record: Record) -> None:
        self.records.append(record)
        if not record.error and turn + 1 < len(session):
            next_ns = self._agenda.clock.ns + ns_of(self._traffic.think_s)
            self._agenda.at(next_ns, partial(self._send, session, turn + 1, next_ns * NS))
            return
        self._num_ended += 1
        if self._traffic.offsets_ns is None:
            self._agenda.at(self._agenda.clock.ns, self._begin_next)
        if self._num_ended == len(self._traffic.sessions):
            self._on_end()
