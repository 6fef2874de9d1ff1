"""Runs attacks beside healthy streams, and judges each by what it did to streams, event loop, memory and files."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.serving.promises import Broken, Unmeasured, require
from benchmarks.serving.server import Server
from benchmarks.serving.siege.measures import Memory, known_files, lags
from benchmarks.serving.siege.streams import Gap
from benchmarks.serving.siege.verdicts import QUIET_S, allowed_gap_s, files_fault, gap_fault, lag_fault

AGAIN = 3  # times that a step is made whose effect may come from another process on the machine
_SURE = 3.0  # times the allowed gap: no other process makes such gaps
FLOOR_S = 5.0
Run = Callable[[Server], str]


@dataclass(frozen=True)
class Row:
    """An attack: its name, its steps by name, and the memory that it may take meanwhile."""

    name: str
    steps: Iterable[tuple[str, Run]]
    peak_bytes: int = 256 << 20  # of the API process, above its memory at rest


def single(name: str, run: Run, peak_bytes: int = 256 << 20) -> Row:
    return Row(name, ((name, run),), peak_bytes)


class Streams(Protocol):
    def longest_gap(self) -> Gap: ...


def floor_gap_s(streams: Streams, seconds: float = FLOOR_S) -> float:
    """The longest gap without attacks: what the machine itself costs."""
    streams.longest_gap()
    time.sleep(seconds)
    return streams.longest_gap().longest_s


def about_floor(floor_s: float, limit_s: float) -> str:
    said = f"without attacks the longest gap is {1e3 * floor_s:.0f} ms"
    if floor_s <= QUIET_S:
        return f"{said}: the machine is quiet"
    allowed_s = allowed_gap_s(limit_s, floor_s)
    return f"{said}: the machine is NOT QUIET, and {1e3 * allowed_s:.0f} ms are allowed instead of {1e3 * limit_s:.0f}"


class Ground:
    """A server and the streams beside its attacks."""

    def __init__(self, server: Server, streams: Streams, allowed_s: float, outside: Path, memory: Memory) -> None:
        """`outside`: a folder that is not the server's."""
        self._server, self._streams, self._allowed_s = server, streams, allowed_s
        self._outside, self._memory = outside, memory

    def attack(self, row: Row) -> str:
        """What was measured. Raises Broken for what the attack must not leave behind, and Unmeasured if this machine
        was too busy to tell."""
        files = known_files(self._outside)
        self._memory.begin()
        gaps: dict[str, float] = {}
        faults, doubts = list[str](), list[str]()
        said = ""
        for name, run in row.steps:
            said, gaps[name], wrong, doubt = self._step(run)
            faults += [f"{name}: {fault}" for fault in wrong]
            doubts += [f"{name}: {doubt}"] if doubt else []
        about_memory, wrong_memory = self._memory.judge(row.peak_bytes)
        faults += filter(None, (wrong_memory, files_fault(files, known_files(self._outside))))
        worst = sorted(gaps, key=gaps.__getitem__, reverse=True)[:3]
        shown = [f"{name} {1e3 * gaps[name]:.0f} ms" for name in worst]
        about = f"longest gap {1e3 * max(gaps.values()):.0f} ms" if len(gaps) == 1 else f"gaps {', '.join(shown)}"
        measured = f"{said if len(gaps) == 1 else f'{len(gaps)} steps'}; {about}; {about_memory}"
        require(not faults, f"{'; '.join(faults)} ({measured})")
        if doubts:
            raise Unmeasured(f"{'; '.join(doubts)} ({measured})")
        return measured

    def _step(self, run: Run) -> tuple[str, float, list[str], str | None]:
        """What was done, the longest gap, what is wrong each time that it is made, and why that cannot be told."""
        said, shortest_s, faults, doubt = "", float("inf"), list[str](), None
        for _ in range(AGAIN):
            before, broken = lags(self._server), list[str]()
            self._streams.longest_gap()
            try:
                said = run(self._server)
            except Broken as error:
                broken = [str(error)]
            gap = self._streams.longest_gap()
            shortest_s = min(shortest_s, gap.longest_s)
            seen = (gap_fault(gap.longest_s, self._allowed_s), lag_fault(before, lags(self._server), self._allowed_s))
            faults, doubt = judged(gap, *seen, self._allowed_s)
            faults = [*broken, *faults]
            if broken or not (faults or doubt) or gap.sure_s > _SURE * self._allowed_s:
                break
        return said, shortest_s, faults, doubt


def judged(gap: Gap, gap_seen: str | None, lag_seen: str | None, allowed_s: float) -> tuple[list[str], str | None]:
    """Which faults are the server's, and why the others are not judged. A gap is the server's if it is too long
    without the delays of the clients' own timer; a lag of the event loop, which has no time, if no such delay was as
    long as what is allowed."""
    faults = [gap_seen] if gap_seen and gap.sure_s > allowed_s else []
    faults += [lag_seen] if lag_seen and gap.late_s < allowed_s else []
    left = [fault for fault in (gap_seen, lag_seen) if fault and fault not in faults]
    late = f"this machine was busy, and the clients' own timer late by {1e3 * gap.late_s:.0f} ms"
    return faults, f"{late}; {' and '.join(left)}" if left else None
