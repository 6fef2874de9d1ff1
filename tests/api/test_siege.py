"""What `make attack` judges by: each verdict must be able to fail."""

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.promises import UNMEASURED, Broken, Holdings, Unmeasured, keep
from benchmarks.serving.siege import ground, streams, verdicts
from benchmarks.serving.siege.ground import Ground, Row, about_floor, single
from benchmarks.serving.siege.measures import Memory, bytes_below, known_files
from benchmarks.serving.siege.streams import Gap

MIB = 1 << 20


def test_a_gap_is_judged_against_the_limit_or_the_floor() -> None:
    assert verdicts.allowed_gap_s(0.1, 0.05) == 0.1
    assert verdicts.allowed_gap_s(0.1, 0.08) == pytest.approx(0.18)
    assert verdicts.gap_fault(0.1, 0.1) is None
    assert verdicts.gap_fault(0.101, 0.1) == "a healthy stream stood still for 101 ms, more than 100"
    assert about_floor(0.02, 0.1) == "without attacks the longest gap is 20 ms: the machine is quiet"
    assert "NOT QUIET, and 180 ms are allowed instead of 100" in about_floor(0.08, 0.1)


def test_lateness_is_judged_by_what_was_added() -> None:
    before = {0.05: 10.0, 0.1: 12.0, 0.25: 12.0, math.inf: 13.0}
    more = {0.05: 20.0, 0.1: 32.0, 0.25: 32.0, math.inf: 33.0}
    assert verdicts.lag_fault(before, more, 0.1) is None
    late = more | {0.25: 34.0, math.inf: 36.0}
    assert verdicts.lag_fault(before, late, 0.1) == "the event loop was late by more than 100 ms, 3 times"
    assert verdicts.lag_fault(before, late, 0.18) == "the event loop was late by more than 250 ms, 1 times"


def test_memory_is_judged_at_its_peak_and_afterwards() -> None:
    assert verdicts.memory_fault(100 * MIB, 10 * MIB, 100 * MIB, 10 * MIB) is None
    assert verdicts.memory_fault(101 * MIB, 0, 100 * MIB, 10 * MIB) == "memory rose by 101 MiB, more than 100"
    assert verdicts.memory_fault(0, 11 * MIB, 100 * MIB, 10 * MIB) == "11 MiB of memory are kept, more than 10"


def test_quotas_and_statuses_are_judged() -> None:
    assert verdicts.quota_fault("batches", 16, 16) is None
    assert verdicts.quota_fault("batches", 17, 16) == "batches: 17 where 16 are allowed"
    assert verdicts.status_fault(Counter({"200": 3}), "200") is None
    assert verdicts.status_fault(Counter({"200": 3, "0": 1}), "200") == "answers are not all 200: {'0': 1}"
    assert verdicts.status_fault(Counter(), "200") is not None


def test_files_are_known_by_content_mode_time_and_target(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("a")
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "dangling").symlink_to("nothing")
    before = known_files(tmp_path)
    assert sorted(before) == ["dangling", "folder", "folder/file", "link"]
    assert verdicts.files_fault(before, known_files(tmp_path)) is None
    changes: list[Callable[[], object]] = [
        lambda: (tmp_path / "folder" / "file").write_text("b"),
        lambda: (tmp_path / "folder" / "file").chmod(0o600),
        lambda: (tmp_path / "link").rename(tmp_path / "folder" / "link"),
        lambda: (tmp_path / "dangling").unlink(),
        (tmp_path / "new").touch,
    ]
    for change in changes:
        change()
        now = known_files(tmp_path)
        assert "outside the server's folders have changed" in str(verdicts.files_fault(before, now))
        before = now


def test_files_that_vanish_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the folder of the server itself is walked."""
    (tmp_path / "stays").write_text("12345")
    (tmp_path / "vanishes").write_text("1")
    real = Path.lstat

    def lstat(path: Path) -> Any:
        (tmp_path / "vanishes").unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert bytes_below(tmp_path) == 5
    process = SimpleNamespace(children=lambda recursive: [], memory_maps=list, num_threads=lambda: 1)
    monkeypatch.setattr("benchmarks.serving.promises.psutil.Process", lambda pid: process)
    for folder, shared in ((None, set()), (tmp_path, {str(tmp_path / "stays")})):
        server: Any = SimpleNamespace(pid=os.getpid(), metric=lambda name: 0, folder=folder)
        assert Holdings.of(server).shared == shared


class Field:
    """A ground whose measurements are given."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *gaps_s: float, late: int = 0, own_s: float = 0.0
    ) -> None:
        """`late`: turns of the event loop per attack. `own_s`: delay of the clients' timer in each."""
        self.gaps_s, self.own_s, self.runs = [*gaps_s], own_s, 0
        self.fault: str | None = None
        counts = iter(range(0, 100 * late, late) if late else [0] * 100)
        monkeypatch.setattr(ground, "lags", lambda server: {0.1: 0.0, math.inf: float(next(counts))})
        memory: Any = SimpleNamespace(begin=lambda: None, judge=lambda peak: ("memory", self.fault))
        server: Any = None
        self.ground = Ground(server, self, 0.1, folder, memory)
        self.reset = False

    def longest_gap(self) -> Gap:
        """Each attack asks before and after."""
        self.reset = not self.reset
        gap_s = 0.0 if self.reset else self.gaps_s.pop(0)
        return Gap(gap_s, max(0.0, gap_s - self.own_s), self.own_s)

    def run(self, server: Any) -> str:
        self.runs += 1
        return "done"


def test_an_attack_is_repeated_before_it_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field(tmp_path, monkeypatch, 0.3, 0.2, 0.09)
    assert field.ground.attack(single("x", field.run)) == "done; longest gap 90 ms; memory"
    assert field.runs == 3
    field = Field(tmp_path, monkeypatch, 0.3, 0.2, 0.25)
    with pytest.raises(
        Broken, match=r"^x: a healthy stream stood still for 250 ms, more than 100 \(done; longest gap 200"
    ):
        field.ground.attack(single("x", field.run))
    assert field.runs == 3


def test_each_step_of_an_attack_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field(tmp_path, monkeypatch, 0.01, 0.3, 0.3, 0.3, 0.02)
    with pytest.raises(Broken, match=r"^b: a healthy stream .*\(3 steps; gaps b 300 ms, c 20 ms, a 10 ms"):
        field.ground.attack(Row("x", [(name, field.run) for name in "abc"]))


def test_lateness_memory_files_and_the_attack_itself_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = Field(tmp_path, monkeypatch, *[0.0] * 9, late=1)
    with pytest.raises(Broken, match="x: the event loop was late by more than 100 ms, 1 times"):
        field.ground.attack(single("x", field.run))

    field = Field(tmp_path, monkeypatch, *[0.0] * 9)
    field.fault = "memory rose"
    with pytest.raises(Broken, match=r"^memory rose"):
        field.ground.attack(single("x", field.run))

    field = Field(tmp_path, monkeypatch, *[0.0] * 9)
    with pytest.raises(Broken, match="have changed: new"):
        field.ground.attack(single("x", lambda server: str((tmp_path / "new").write_text("x"))))

    def broken(server: Any) -> str:
        raise Broken("found itself")

    field = Field(tmp_path, monkeypatch, *[0.0] * 9)
    with pytest.raises(Broken, match=r"^x: found itself"):
        field.ground.attack(single("x", broken))
    assert keep({"x": lambda: field.ground.attack(single("x", broken))}) == 1
    assert keep({"x": lambda: field.ground.attack(single("x", field.run))}) == 0


def test_a_gap_of_a_busy_machine_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    field = Field(tmp_path, monkeypatch, 0.3, 0.3, 0.3, own_s=0.2)
    assert keep({"x": lambda: field.ground.attack(single("x", field.run)), "y": lambda: "kept"}) == UNMEASURED
    said = capsys.readouterr().out
    assert "x: NOT MEASURED: x: this machine was busy, and the clients' own timer late by 200 ms" in said
    assert "1 of 2 could not be measured" in said
    field = Field(tmp_path, monkeypatch, 0.31, 0.31, 0.31, own_s=0.2)
    with pytest.raises(Broken, match="stood still for 310 ms"):
        field.ground.attack(single("x", field.run))
    for own_s, expected in ((0.1, Unmeasured), (0.09, Broken)):
        field = Field(tmp_path, monkeypatch, *[0.0] * 9, late=1, own_s=own_s)
        with pytest.raises(expected, match="the event loop was late by more than 100 ms, 1 times"):
            field.ground.attack(single("x", field.run))


class Clock:
    """Of a process: time passes while it computes, and otherwise when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self._used_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("time.thread_time", self._compute)

    def _compute(self) -> float:
        self.now_s += 0.0005
        self._used_s += 0.0005
        return self._used_s


@pytest.mark.parametrize(
    ("stalls_s", "ticks_s", "waits_s", "gap_s", "sure_s"),
    [
        (0.5, [], 0.0, 0.5, 0.5),  # of the server
        (0.5, [], 0.1, 0.4, 0.4),  # and it waited for a core
        (0.5, [0.5], 0.0, 0.5, 0.0),  # of the machine
        (0.5, [0.2, 0.2], 0.1, 0.4, 0.1),  # of it, at most as long
    ],
)
def test_a_stall_is_noted_with_and_without_what_the_machine_did(
    monkeypatch: pytest.MonkeyPatch, stalls_s: float, ticks_s: list[float], waits_s: float, gap_s: float, sure_s: float
) -> None:
    clock, waited_s, noted = Clock(monkeypatch), 0.0, list[tuple[float, float]]()
    timer = streams.Timer()
    watch: Any = SimpleNamespace(
        waits=SimpleNamespace(seconds=lambda: waited_s), timer=timer, note=lambda *gaps: noted.append(gaps)
    )
    stream = streams._Stream(watch, "x")
    for _ in range(streams.FIRST_EVENTS + 1):
        stream.data_received(b"data")
        clock.now_s += 0.01
    clock.now_s += stalls_s - 0.01 - sum(ticks_s)
    waited_s = waits_s
    noted.clear()
    for late_s in ticks_s[:-1]:
        timer._due_s = clock.now_s
        clock.now_s += late_s
        timer.compute()
    if ticks_s:
        timer._due_s = clock.now_s  # and the data is read before the timer runs
        clock.now_s += ticks_s[-1]
    stream.data_received(b"data")
    assert noted[0] == pytest.approx((gap_s, sure_s), abs=0.02)
    if ticks_s:
        timer.compute()
        assert timer.longest_s == pytest.approx(max(ticks_s), abs=0.1)
        stream.data_received(b"data")
        assert noted[1] == pytest.approx((0, 0), abs=0.02), "no delay counts twice"


def test_a_stream_that_says_something_else_is_broken() -> None:
    async def run() -> list[str]:
        wrong: Any = SimpleNamespace(put=lambda what: said.append(what))
        waits = streams.CoreWaits([])
        watch = streams._Watch("127.0.0.1", 9, None, {}, wrong, wrong, wrong, waits)
        watch.start = lambda name: None  # type: ignore[method-assign]
        for end in (b'"text":"a" data: [DONE]', b'"text":"a" data: [DONE]', b'"text":"b" data: [DONE]', b'"text":"a"'):
            watch.ended("x", end)
        return said

    said: list[str] = []
    assert len(asyncio.run(run())) == 2


def test_memory_is_measured_of_the_process() -> None:
    server: Any = SimpleNamespace(pid=os.getpid())
    memory = Memory(server)
    held = b"x" * (64 << 20)
    said, fault = memory.judge(32 << 20)
    assert said.startswith("memory +")
    assert fault is not None
    assert fault.startswith("memory rose by")
    del held
    memory.begin()
    assert memory.judge(32 << 20)[1] is None
