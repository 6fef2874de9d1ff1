"""What a server must survive: its engine killed under load, hostile clients, and the death of everything.

    python -m benchmarks.serving.chaos [--streams 64] [--rounds 2] [--hostile 5000]

Runs the embedded model. Ends with status 1 and a line for each promise that was not kept. Every attack is made from a
seed, so that one that did harm can be made again.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.attacks import Attack, attacks, post
from benchmarks.serving.server import Server

ERROR_S = 2.0  # from the death of an engine to the end of each of its streams
READY_S = 60.0
CLIENTS = 32  # hostile ones at a time
ATTACK_S = 60.0  # longer than any answer takes
SETTLE_S = 10.0
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # that asyncio.to_thread starts as it needs them, and keeps
GROWTH_BYTES = 192 << 20  # of both processes together, under thousands of attacks
QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]
ANSWER = "85"


# What each kind of stream sends, and how it must end when the engine dies.
ENDLESS = {"ignore_eos": True, "max_tokens": 1500}
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
LONG_RESPONSE = {"input": "List", "text": {"format": {"type": "json_schema", "name": "long", "schema": LONG}}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ENDLESS | {"messages": QUESTION},
    "/v1/completions": ENDLESS | {"prompt": "Once upon a time"},
    "/v1/responses": LONG_RESPONSE | {"store": False},
}
CODE = rb'"code":"engine_died"'
STREAM_ENDS = [
    re.compile(CODE + rb".*\n\ndata: \[DONE\]\n\n", re.DOTALL),
    re.compile(CODE + rb".*\n\ndata: \[DONE\]\n\n", re.DOTALL),
    re.compile(
        rb'event: response.failed\ndata: [^\n]*"error":\{"code":"server_error","message":"The engine failed[^\n]*\n\n'
    ),
]


class Broken(Exception):  # noqa: N818  (reads as what happened)
    """A promise that was not kept."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


@dataclass(frozen=True)
class Holdings:
    """What a server that rests holds of the system."""

    files: int  # descriptors of the API process
    threads: int
    tasks: int
    connections: int
    processes: int
    shared: frozenset[str]  # mapped segments of shared memory, and what lies in the folder for sockets

    @classmethod
    def of(cls, server: Server) -> "Holdings":
        process = psutil.Process(server.pid)
        children = process.children(recursive=True)
        mapped = {
            part.path for p in (process, *children) for part in p.memory_maps() if part.path.startswith("/dev/shm")
        }
        folder = Path(server.environment.get("TMPDIR", tempfile.gettempdir()))
        return cls(
            files=process.num_fds(),
            threads=process.num_threads(),
            tasks=int(server.metric("oscine:asyncio_tasks")),
            connections=int(server.metric("oscine:http_connections")),
            processes=len(children),
            shared=frozenset(mapped | {str(path) for path in folder.rglob("*")}),
        )

    def beyond(self, before: "Holdings") -> dict[str, Any]:
        slack = {"files": 0, "threads": POOL_THREADS, "tasks": 0, "connections": 0, "processes": 0}
        more = {
            name: f"{getattr(before, name)} -> {getattr(self, name)}"
            for name, allowed in slack.items()
            if getattr(self, name) > getattr(before, name) + allowed
        }
        return more | (
            {"shared": len(self.shared) - len(before.shared)} if len(self.shared) > len(before.shared) else {}
        )


def settle(server: Server, before: Holdings) -> None:
    """Raises Broken for what the server still holds beyond `before` when it has had its time."""
    wait(lambda: not Holdings.of(server).beyond(before), SETTLE_S)
    more = Holdings.of(server).beyond(before)
    require(not more, f"the server leaks: {more}")


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_ready(server: Server) -> bool:
    try:
        return bool(server.get("/v1/health/ready"))
    except urllib.error.HTTPError:
        return False


def answers_right(server: Server) -> bool:
    body = json.dumps({"messages": QUESTION, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return ANSWER in str(json.load(response)["choices"][0]["message"]["content"])


# ---- the engine killed under load ----


async def stream_until_killed(server: Server, i: int, started: asyncio.Semaphore) -> tuple[bytes, float]:
    """What came after the first token, and when it ended."""
    path = list(STREAMS)[i % len(STREAMS)]
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(post(path, json.dumps(STREAMS[path] | {"stream": True}).encode()))
        try:
            await reader.readuntil(b"\ndata: ")
        except asyncio.IncompleteReadError as error:
            raise Broken(f"no stream, but {error.partial!r}") from None
        started.release()
        rest = await reader.read()
        return rest, time.monotonic()
    finally:
        writer.close()


async def kill_under(server: Server, streams: int) -> float:
    """Seconds from the kill to the end of the last stream."""
    started = asyncio.Semaphore(0)
    try:
        async with asyncio.timeout(READY_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream_until_killed(server, i, started)) for i in range(streams)]
            for _ in tasks:
                await started.acquire()
            killed_s = time.monotonic()
            os.kill(server.engine_pid, signal.SIGKILL)
    except ExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None
    ends = [task.result() for task in tasks]
    for i, (rest, _) in enumerate(ends):
        end = STREAM_ENDS[i % len(STREAMS)]
        require(end.search(rest) is not None, f"no clean error: {rest[-500:]!r}")
    return max(at_s for _, at_s in ends) - killed_s


def engine_killed(server: Server, streams: int, rounds: int, within_s: float = ERROR_S) -> str:
    """A warm-up comes first: what it leaves is what a server holds. Raises Broken."""
    before = None
    slowest_s = restart_s = 0.0
    for i in range(rounds + 1):
        error_s = asyncio.run(kill_under(server, streams))
        died_s = time.monotonic()
        require(wait(lambda: is_ready(server), READY_S), "the server is not ready again")
        slowest_s, restart_s = max(slowest_s, error_s), max(restart_s, time.monotonic() - died_s)
        require(error_s <= within_s, f"the last error came {error_s:.2f} s after the kill")
        require(answers_right(server), "a wrong answer after the restart")
        if before is None:
            time.sleep(0.5)
            before = Holdings.of(server)
        settle(server, before)
        require(server.metric("oscine:engine_restarts_total") == i + 1, "restarts are miscounted")
    return f"all errors within {slowest_s:.2f} s of the kill, ready again within {restart_s:.1f} s, no leaks"


# ---- hostile clients ----


async def make(server: Server, attack: Attack) -> int | None:
    """The status of the first response, if there was any; 0 for a connection that the server closed without one."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        for piece in attack.pieces:
            writer.write(piece)
            await writer.drain()
            if attack.pause_s:
                await asyncio.sleep(attack.pause_s)
        if attack.leaves:
            return None
        if attack.half_closes:
            writer.write_eof()
        answer = await reader.read(1 << 16)
        while await reader.read(1 << 16):
            pass
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    except OSError:  # closed before all was sent
        return None
    finally:
        writer.close()


async def make_all(server: Server, made: list[Attack]) -> Counter[str]:
    """How often each status came. Raises Broken for an answer that blames the server, or none in time."""
    statuses: Counter[str] = Counter()
    queue = iter(made)

    async def client() -> None:
        for attack in queue:
            try:
                async with asyncio.timeout(ATTACK_S):
                    status = await make(server, attack)
            except TimeoutError:
                raise Broken(f"no answer to {attack.name}") from None
            require(status != 500, f"500 for {attack.name}: {attack.pieces[0][:2000]!r}")
            statuses[str(status)] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses


def resident_bytes(server: Server) -> int:
    process = psutil.Process(server.pid)
    return int(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))


def hostile_requests(server: Server, count: int, seed: int = 0) -> str:
    """The first tenth is a warm-up, in which memory may grow to what serving takes. Raises Broken."""
    document = json.loads(server.get("/openapi.json"))
    made = attacks(document, server.model(), count, seed)
    engine, warm_up = server.engine_pid, max(count // 10, 1)
    statuses = asyncio.run(make_all(server, made[:warm_up]))
    wait(lambda: not server.metric("oscine:num_requests_running"), SETTLE_S)
    time.sleep(0.5)
    before, before_bytes = Holdings.of(server), resident_bytes(server)
    statuses += asyncio.run(make_all(server, made[warm_up:]))
    require(server.engine_pid == engine, "an attack ended the engine")
    require(answers_right(server), "a wrong answer after the attacks")
    settle(server, before)
    growth = resident_bytes(server) - before_bytes
    require(growth <= GROWTH_BYTES, f"memory has grown by {growth >> 20} MiB from {before_bytes >> 20} MiB")
    shown = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    return f"{count} requests answered ({shown}), memory {before_bytes >> 20} {growth >> 20:+d} MiB, no leaks"


# ---- the death of everything ----


def call(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def everything_killed() -> str:
    """A response that was stored is there after kill -9 of all processes, and can be gone on from. Raises Broken."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--log-level", "error", "--responses-db", f"{folder}/responses.db")
        with Server(*options) as server:
            first = call(server, "/v1/responses", {"input": "What is 27 + 58?", "temperature": 0})
            unfinished = call(server, "/v1/responses", LONG_RESPONSE | {"background": True})
            for pid in (server.pid, server.engine_pid):
                os.kill(pid, signal.SIGKILL)
        with Server(*options) as server:
            found = call(server, f"/v1/responses/{first['id']}")
            require(found == first, f"stored {first}, found {found}")
            state = call(server, f"/v1/responses/{unfinished['id']}")["status"]
            require(state in ("failed", "cancelled", "incomplete"), f"a response that nobody makes any more is {state}")
            body = {"input": "And 11 + 12?", "previous_response_id": first["id"], "temperature": 0}
            more = call(server, "/v1/responses", body)
            require(more["usage"]["input_tokens"] > first["usage"]["input_tokens"], "the conversation was lost")
    return "the stored response is the same, and was gone on from"


def with_server(check: Callable[[Server], str]) -> str:
    """With a folder for sockets of its own, where what is left behind is seen."""
    with tempfile.TemporaryDirectory() as folder:
        with Server("--log-level", "error", environment={"TMPDIR": folder}) as server:
            found = check(server)
        left = [*Path(folder).iterdir()]
        require(not left, f"left behind at the end: {left}")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hostile", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    promises: dict[str, Callable[[], str]] = {
        "engine killed": lambda: with_server(lambda server: engine_killed(server, args.streams, args.rounds)),
        "hostile clients": lambda: with_server(lambda server: hostile_requests(server, args.hostile, args.seed)),
        "everything killed": everything_killed,
    }
    broken = 0
    for name, check in promises.items():
        started_s = time.monotonic()
        try:
            found = check()
        except Broken as error:
            broken += 1
            found = f"BROKEN: {error}"
        print(f"{name}: {found} ({time.monotonic() - started_s:.0f} s)", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
