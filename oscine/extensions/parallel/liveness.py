"""Whether another process still does something. Read from Linux's /proc."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from oscine.types import RankLostError as RankLostError

HUNG_S = 5.0  # after which a process that does nothing is given up
_LOOKS = 5  # in a row that find nothing done, after a first one
LOOK_S = HUNG_S / (_LOOKS + 1)


class PeerWatchdog:
    """One wait for other processes."""

    def __init__(self, check: Callable[[], None], peers: Mapping[str, int], *, at_work: bool = True) -> None:
        """`check` raises for a process that has ended. `peers`: process ids by the names for an error.

        `at_work`: without time of a CPU they hang; else only where a signal has stopped them.
        """
        self._check, self._peers, self._at_work = check, peers, at_work
        self._looked_s = time.monotonic()
        self._ticks: dict[str, int] = {}
        self._idle_looks = dict.fromkeys(peers, 0)  # in a row

    def look(self) -> None:
        """Raises RankLostError if the wait is in vain. A process is given up if it hangs for HUNG_S.

        Looks are counted, not seconds: a wait that was itself stopped for a while proves nothing.
        """
        self._check()
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for name, pid in self._peers.items():
            self._idle_looks[name] = self._idle_looks[name] + 1 if self._hangs(name, pid) else 0
            if self._idle_looks[name] >= _LOOKS:
                raise RankLostError(f"{name} did nothing for {HUNG_S:g} s")

    def _hangs(self, name: str, pid: int) -> bool:
        if not self._at_work:
            return is_stopped(pid)
        before, self._ticks[name] = self._ticks.get(name), cpu_ticks(pid)
        return before == self._ticks[name]


def cpu_ticks(pid: int) -> int:
    """The time that a process has had of CPUs; -1 if it is gone."""
    fields = _fields(pid)
    return sum(map(int, fields[11:13])) if fields else -1


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it."""
    return _fields(pid)[:1] == ["T"]


def _fields(pid: int) -> list[str]:
    """What /proc has of a process after its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
