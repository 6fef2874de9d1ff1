"""Processes that end, stop, sleep or work, and what a wait for them says."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("msgspec", reason="it encodes the messages between processes")

from oscine.extensions.parallel import liveness
from oscine.extensions.parallel.liveness import PeerWatchdog, cpu_ticks, is_stopped
from oscine.types import RankLostError
from tests.waiting import wait_until

SLEEPS, WORKS = "import time; time.sleep(600)", "while True: pass"


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of a wait. It stands still between two looks."""
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    return clock


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", request.param]) as process:
        yield process
        process.kill()


def nothing() -> None:
    pass


def look(watchdog: PeerWatchdog, clock: Clock, count: int = 1) -> None:
    for _ in range(count):
        clock.now_s += liveness.LOOK_S + 0.1
        watchdog.look()


def stop(process: "subprocess.Popen[bytes]") -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "a process that is stopped")


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_at_work_that_takes_no_time_of_a_cpu_hangs(process: subprocess.Popen[bytes], clock: Clock) -> None:
    watchdog = PeerWatchdog(nothing, {"rank 1": process.pid})
    with pytest.raises(RankLostError, match="rank 1 did nothing for 5 s"):
        wait_until(lambda: bool(look(watchdog, clock)), "an error, once the process has started")


@pytest.mark.parametrize("process", [WORKS], indirect=True)
def test_a_process_that_works_does_not_hang_until_it_is_stopped(process: subprocess.Popen[bytes], clock: Clock) -> None:
    watchdog = PeerWatchdog(nothing, {"rank 1": process.pid})
    for _ in range(10):
        look(watchdog, clock)
        ticks = cpu_ticks(process.pid)
        wait_until(lambda: cpu_ticks(process.pid) > ticks, "some work")  # noqa: B023
    stop(process)
    look(watchdog, clock, 5)
    with pytest.raises(RankLostError, match="rank 1 did nothing"):
        look(watchdog, clock)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_that_may_be_idle_is_lost_only_when_it_is_stopped(
    process: subprocess.Popen[bytes], clock: Clock
) -> None:
    watchdog = PeerWatchdog(nothing, {"rank 0": process.pid}, at_work=False)
    look(watchdog, clock, 20)
    stop(process)
    look(watchdog, clock, 4)
    with pytest.raises(RankLostError, match="rank 0 did nothing"):
        look(watchdog, clock)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_that_goes_on_is_forgiven(process: subprocess.Popen[bytes], clock: Clock) -> None:
    """A wait of its own begins anew, so what was seen before does not count."""
    stop(process)
    watchdog = PeerWatchdog(nothing, {"rank 0": process.pid}, at_work=False)
    look(watchdog, clock, 4)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not is_stopped(process.pid), "a process that goes on")
    look(watchdog, clock, 20)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_one_long_pause_of_the_one_that_waits_proves_nothing(process: subprocess.Popen[bytes], clock: Clock) -> None:
    stop(process)
    watchdog = PeerWatchdog(nothing, {"rank 1": process.pid}, at_work=False)
    clock.now_s += 3600
    for _ in range(10):  # that is one look, as no time passes
        watchdog.look()
    look(watchdog, clock, 3)
    with pytest.raises(RankLostError, match="rank 1 did nothing"):
        look(watchdog, clock)


def test_what_has_ended_is_said_at_once() -> None:
    def fail() -> None:
        raise RankLostError("rank 1 was killed by signal 9")

    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        PeerWatchdog(fail, {}).look()


def test_a_process_that_is_gone_has_no_state() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (cpu_ticks(process.pid), is_stopped(process.pid)) == (-1, False)
