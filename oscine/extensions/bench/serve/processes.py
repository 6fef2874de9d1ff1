"""The client processes of a measurement: forks, each with its share of the sessions."""

import asyncio
import gc
import json
import mmap
import os
import select
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from oscine.engine.process.descriptors import raise_descriptor_limit
from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.drive import NUM_COUNTERS, Client, Driver, Job
from oscine.system.python_child import die_with_parent

_PATIENCE_S = 0.2  # between two readings of the counters
_AHEAD_S = 0.1  # from the fork to the first request


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    busy: float  # CPU time of the busiest client over the time of the measurement


class ClientError(Exception):
    """A client process has ended; its own output says why."""


def run_clients(
    client: Client, jobs: Sequence[Job], arrival: Arrival, num_processes: int, watch: Callable[[list[int]], None]
) -> Outcome:
    """`watch` is called with the counters of all clients, repeatedly and at the end."""
    count = min(num_processes, len(jobs), arrival.concurrency or len(jobs))
    shared = mmap.mmap(-1, 8 * NUM_COUNTERS * count)
    counters = memoryview(shared).cast("q")
    sys.stdout.flush()
    sys.stderr.flush()
    start_s = time.perf_counter() + _AHEAD_S
    children: dict[int, int] = {}  # the end of each child's pipe -> its process
    try:
        for index in range(count):
            own = counters[NUM_COUNTERS * index : NUM_COUNTERS * (index + 1)]
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_client(theirs, Driver(client, own), jobs[index::count], arrival.share(index, count), start_s)
            os.close(theirs)
            children[ours] = pid
        said = _read_all(list(children), lambda: watch(_sums(counters, count)))
    except BaseException:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for ours, pid in children.items():
            os.close(ours)
            os.waitpid(pid, 0)
    parts = [_decode(data) for data in said]
    return Outcome([record for part in parts for record in part.records], max(part.busy for part in parts))


def _sums(counters: "memoryview[int]", count: int) -> list[int]:
    return [sum(counters[kind + NUM_COUNTERS * index] for index in range(count)) for kind in range(NUM_COUNTERS)]


def _read_all(pipes: Sequence[int], watch: Callable[[], None]) -> list[bytes]:
    said: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
    still_open = list(pipes)
    while still_open:
        for pipe in select.select(still_open, [], [], _PATIENCE_S)[0]:
            data = os.read(pipe, 1 << 20)
            said[pipe].append(data)
            if not data:
                still_open.remove(pipe)
        watch()
    return [b"".join(said[pipe]) for pipe in pipes]


def _be_client(pipe: int, driver: Driver, jobs: Sequence[Job], arrival: Arrival, start_s: float) -> NoReturn:
    """Ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    try:
        raise_descriptor_limit()
        gc.freeze()
        gc.disable()  # a pause would be measured
        with _runner() as runner:
            before_s = time.process_time()
            records = runner.run(driver.drive(jobs, arrival, start_s))
            busy = (time.process_time() - before_s) / (time.perf_counter() - start_s)
        with os.fdopen(pipe, "wb") as file:
            file.write(_encode(records, busy))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)


def _runner() -> "asyncio.Runner":
    """Uses uvloop if it is installed: it takes half the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _encode(records: Sequence[Record], busy: float) -> bytes:
    """A line of JSON, then the times of all events in binary."""
    rows = [
        (
            *(r.due_s, r.sent_s, len(r.events_s), r.prompt_tokens, r.output_tokens, r.cached_tokens),
            *(r.has_usage, r.error, r.begun_s, r.ended_s),
        )
        for r in records
    ]
    return json.dumps([busy, rows]).encode() + b"\n" + b"".join(r.events_s.tobytes() for r in records)


def _decode(data: bytes) -> Outcome:
    line, end, times = data.partition(b"\n")
    if not end:
        raise ClientError("a client process has ended without a result")
    busy, rows = json.loads(line)
    all_s = array("d", times)
    records, at = [], 0
    for due_s, sent_s, num_events, *others in rows:
        records.append(Record(due_s, sent_s, all_s[at : at + num_events], *others))
        at += num_events
    return Outcome(records, busy)
