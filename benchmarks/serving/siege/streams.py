"""Streams of honest clients beside an attack, in a process of its own that checks their gaps and texts.

Time in which the main threads of API, engine and this process waited for a core is left out of a gap: other
processes of the machine, including the attackers, used that core. Waiting for the interpreter's lock is not left out.

What these waits do not show (the holder of that lock waits for a core, the machine stood still, all processes were
stopped) delays a timer of this process too. So a gap is told twice, the second time without the timer's delays.
"""

import asyncio
import json
import math
import multiprocessing
import os
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.serving.promises import require, wait
from benchmarks.serving.server import Server
from benchmarks.serving.siege.requests import post

TOKENS = 400  # of a stream; then comes the next
STAGGER = 30  # tokens by which each stream is longer than the one before, so that not all begin at once
FIRST_EVENTS = 24  # of a stream: it may be queued at first, and the header of its final message is tokens without text
SAID = re.compile(rb'"(?:content|reasoning|text)":("(?:[^"\\]|\\.)*")')
_TICK_S, _COMPUTES_S = 0.02, 0.001  # of the timer
MOVING_S = 20.0  # in which streams must make progress
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me something."}]},
    "/v1/completions": {"prompt": "Once upon a time"},
}


class CoreWaits:
    """Sums the time for which main threads of processes have waited for a core; 0 if the kernel does not count."""

    def __init__(self, pids: Sequence[int]) -> None:
        paths = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in pids]
        self._files = [path.open("rb", buffering=0) for path in paths if path.exists()]

    def seconds(self) -> float:
        return sum(int(os.pread(file.fileno(), 128, 0).split()[1]) for file in self._files) / 1e9


class Timer:
    """Measures how late this process is: it is to wake up regularly, and then computes for a moment."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # delay
        self._total_s = 0.0
        self._due_s = math.inf  # of the next tick

    async def run(self) -> None:
        while True:
            self._due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.compute()

    def compute(self) -> None:
        """Ends a tick."""
        end_s = time.thread_time() + _COMPUTES_S
        while (used_s := time.thread_time()) < end_s:
            pass
        late_s = max(0.0, time.monotonic() - self._due_s - (used_s - end_s + _COMPUTES_S))
        self._total_s += late_s
        self.longest_s = max(self.longest_s, late_s)
        self._due_s = math.inf

    def seconds(self, now_s: float) -> float:
        """The sum of all delays, with that of a tick that is due."""
        return self._total_s + max(0.0, now_s - self._due_s)


@dataclass(frozen=True)
class Gap:
    """What was measured since it was last asked for, in seconds."""

    longest_s: float  # between two events of a stream
    sure_s: float  # the longest that is left when the delays of the timer in each gap are taken away
    late_s: float  # the longest delay of the timer


class _Stream(asyncio.Protocol):
    def __init__(self, watch: "_Watch", name: str) -> None:
        self._watch, self._name = watch, name
        self._pieces: list[bytes] = []
        self._last_s = self._waited_s = self._late_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._watch.requests[self._name])

    def data_received(self, data: bytes) -> None:
        now_s, waited_s = time.monotonic(), self._watch.waits.seconds()
        late_s = self._watch.timer.seconds(now_s)
        self._pieces.append(data)
        if len(self._pieces) > FIRST_EVENTS:
            passed_s, waits_s, lates_s = now_s - self._last_s, waited_s - self._waited_s, late_s - self._late_s
            self._watch.note(passed_s - waits_s, passed_s - max(waits_s, lates_s))
        self._last_s, self._waited_s, self._late_s = now_s, waited_s, late_s

    def connection_lost(self, error: Exception | None) -> None:
        self._watch.ended(self._name, b"".join(self._pieces))


class _Watch:
    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        requests: dict[str, bytes],
        gap: "SynchronizedArray[float]",
        events: "Synchronized[int]",
        wrong: "Queue[str]",
        waits: CoreWaits,
    ) -> None:
        """`gap`: the fields of a Gap."""
        self.requests, self.waits, self.timer = requests, waits, Timer()
        self._address, self._tls = (host, port), tls
        self._gap, self._events, self._wrong = gap, events, wrong
        self._texts: dict[str, bytes] = {}  # by name: the expected text of each stream
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()

    def start(self, name: str) -> None:
        task = self._loop.create_task(self._connect(name))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, name: str) -> None:
        try:
            await self._loop.create_connection(lambda: _Stream(self, name), *self._address, ssl=self._tls)
        except OSError as error:
            self._wrong.put(f"{name}: {error}")

    def note(self, gap_s: float, sure_s: float) -> None:
        late_s, self.timer.longest_s = self.timer.longest_s, 0.0
        with self._gap.get_lock():
            self._gap[:] = [*map(max, self._gap[:], (gap_s, sure_s, late_s))]
        self._events.value += 1

    def ended(self, name: str, data: bytes) -> None:
        text = b"".join(SAID.findall(data))
        if b"data: [DONE]" not in data or text != self._texts.setdefault(name, text):
            self._wrong.put(f"{name}: {data[:300]!r} ... {data[-300:]!r}")
        self.start(name)


def _run(
    host: str,
    port: int,
    certificate: str | None,
    requests: dict[str, bytes],
    pids: Sequence[int],
    gap: "SynchronizedArray[float]",
    events: "Synchronized[int]",
    wrong: "Queue[str]",
) -> None:
    async def run() -> None:
        tls = None if certificate is None else ssl.create_default_context(cafile=certificate)
        watch = _Watch(host, port, tls, requests, gap, events, wrong, CoreWaits([*pids, os.getpid()]))
        for name in requests:
            watch.start(name)
        await watch.timer.run()

    asyncio.run(run())


class HealthyStreams:
    """Context manager. Each stream must have the same text each time."""

    def __init__(self, server: Server, streams: int, *headers: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        requests: dict[str, bytes] = {}
        for i in range(streams):
            path = [*BODIES][i % len(BODIES)]
            body = BODIES[path] | {"max_tokens": TOKENS + STAGGER * i, "ignore_eos": True, "stream": True}
            requests[f"{path} {i}"] = post(path, json.dumps(body).encode(), *headers)
        self._streams = streams
        self._gap, self._events, self._wrong = context.Array("d", 3), context.Value("q"), context.Queue()
        shared, pids = (self._gap, self._events, self._wrong), (server.pid, server.engine_pid)
        self._process = context.Process(
            target=_run, args=(server.host, server.port, server.certificate, requests, pids, *shared), daemon=True
        )

    def __enter__(self) -> "HealthyStreams":
        self._process.start()
        require(wait(lambda: self._events.value > self._streams * TOKENS, 60), "healthy streams do not begin")
        self.longest_gap()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()

    def longest_gap(self) -> Gap:
        """What was measured since the last call; waits for the end of an open gap. Raises Broken if a stream broke."""
        seen = self._events.value
        moving = wait(lambda: self._events.value > seen + 2 * self._streams, MOVING_S)
        require(self._wrong.empty(), "" if self._wrong.empty() else f"a healthy stream broke: {self._wrong.get()}")
        require(moving, f"healthy streams stand still for {MOVING_S:g} s")
        with self._gap.get_lock():
            found = Gap(*self._gap[:])
            self._gap[:] = [0.0] * 3
        return found
