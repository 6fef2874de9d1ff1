"""A server must survive the kill of its engine under load, and the death of all processes. siege has hostile clients.

    python -m benchmarks.serving.chaos [--streams 64] [--rounds 2]

Runs the embedded model. Prints one line per broken promise, and then ends with status 1.
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
from collections.abc import Callable
from typing import Any

from benchmarks.serving.promises import (
    QUESTION,
    Broken,
    Holdings,
    answers_right,
    is_ready,
    keep,
    require,
    settle,
    wait,
    with_server,
)
from benchmarks.serving.server import Server
from benchmarks.serving.siege.requests import post

ERROR_S = 2.0  # from the death of an engine to the end of each of its streams
READY_S = 60.0


# The requests of each kind of stream, and their required end when the engine dies.
ENDLESS = {"ignore_eos": True, "max_tokens": 20_000}
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


# ---- the engine killed under load ----


async def stream_until_killed(server: Server, i: int, started: asyncio.Semaphore) -> tuple[bytes, float]:
    """The text after the first token, and the time of the end."""
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
    """A warm-up comes first: its leftovers count as the server's own. Raises Broken."""
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


# ---- the death of everything ----


def call(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def everything_killed() -> str:
    """A stored response exists after kill -9 of all processes, and can be continued. Raises Broken."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds per promise (default: %(default)s)")
    args = parser.parse_args()
    promises: dict[str, Callable[[], str]] = {
        "engine killed": lambda: with_server(lambda server: engine_killed(server, args.streams, args.rounds)),
        "everything killed": everything_killed,
    }
    return keep(promises)


if __name__ == "__main__":
    sys.exit(main())
