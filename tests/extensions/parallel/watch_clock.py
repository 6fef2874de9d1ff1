"""A clock for the watch over silent engines: real time, and the time that a test skips."""

import os
import signal
import time

import pytest

from oscine.engine.process import client
from oscine.extensions.parallel.liveness import is_stopped
from tests.waiting import until

TIMEOUT_S = 600.0  # of watched engines: far above the delays of a busy machine


class WatchClock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.skipped_s, self.looks = 0.0, 0
        patch.setattr(client, "time", self)
        patch.setattr(client, "_LOOKS", TIMEOUT_S / 0.002)
        patch.setattr(client, "_WATCH_S", 0.002)

    def monotonic(self) -> float:
        self.looks += 1
        return time.monotonic() + self.skipped_s

    async def skip(self, seconds: float) -> None:
        """Skips this time. Returns when the watch has read the clock."""
        self.skipped_s += seconds
        before = self.looks
        await until(lambda: self.looks > before + 2, "two looks of the watch")

    async def hang(self, pid: int) -> None:
        """Stops a process, and skips timeouts until it is killed: its last messages may still arrive."""
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: is_stopped(pid), "a process that is stopped")

        def is_killed() -> bool:
            if is_stopped(pid):
                self.skipped_s += TIMEOUT_S
                return False
            return True

        await until(is_killed, "the end of the process that hangs")
