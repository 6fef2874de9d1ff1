"""Attacks by requests and connections. Each returns what it did, and raises Broken for what it found broken itself."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.promises import SETTLE_S, Holdings, answers_right, is_ready, require, settle, wait
from benchmarks.serving.server import Server
from benchmarks.serving.siege.clients import HEALTHY, HOSTILE, MODEL, ask, make_all, make_in_time, shown
from benchmarks.serving.siege.requests import Attack, attacks, post
from benchmarks.serving.siege.shapes import BODY_BYTES, CHAT, RESPONSES, TEXT, chat, slow_grammars
from benchmarks.serving.siege.verdicts import status_fault

BODIES_HELD = 160
LEAVERS = 12
LEFT_S = 30.0  # until the work of departed clients has ended, also work in threads that cannot be interrupted
READY_S = 60.0
MAX_CONNECTIONS = 600
GRAMMAR_S = 10.0  # that the check of a schema may take
MODEL_GROWTH_BYTES = 192 << 20  # of both processes, of the embedded model, under thousands of attacks
TLS_FOLDER = Path(__file__).parents[3] / "tests" / "api" / "tls"
TLS = ("--ssl-certfile", str(TLS_FOLDER / "certificate.pem"), "--ssl-keyfile", str(TLS_FOLDER / "key.pem"))


LargeBody = tuple[str, str, dict[str, Any]]  # name, path, value
BODY_OF_4_MB: LargeBody = ("messages", CHAT, chat(messages=[{"role": "user", "content": "a" * 40}] * 50_000))
BODIES_OF_1_MB: tuple[LargeBody, ...] = (
    ("token ids", TEXT, {"prompt": [65] * 260_000, "max_tokens": 1}),
    ("names", CHAT, chat(metadata={f"k{i}": "v" * 8 for i in range(72_000)})),
    ("text parts", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a" * 10}] * 35_000}])),
)
_BRIEF = json.dumps(chat()).encode()[:-1]  # of few tokens: the fake model may go on with JSON of its own for minutes


def one_shape(shape: Attack) -> Callable[[Server], str]:
    def run(server: Server) -> str:
        return str(asyncio.run(make_in_time(server, shape)))

    return run


def unknown_fields(path: str, count: int) -> Callable[[Server], str]:
    known = {"input": "hi"} if path == RESPONSES else chat(model=MODEL)
    body = json.dumps(known | {f"u{i}": 1 for i in range(count)}).encode()
    return lambda server: str(ask_raw(server, body, path))


def deep_values(server: Server) -> str:
    """In a field that is known, in one that is not, and in a schema."""
    found = []
    for depth in (900, 100_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        for field in (b'"metadata"', b'"later"', b'"guided_json"'):
            found.append(ask_raw(server, b"%s, %s: %s}" % (_BRIEF, field, nested)))
    return str(found)


def huge_numbers(server: Server) -> str:
    found = []
    for number in (b"9" * 4200, b"1e999999999", b"-" + b"9" * 700, b"0." + b"1" * 100_000):
        for field in (b'"seed"', b'"temperature"', b'"max_tokens"', b'"later"'):
            found.append(ask_raw(server, b"%s, %s: %s}" % (_BRIEF, field, number)))
    return str({*found})


def ask_raw(server: Server, body: bytes, path: str = CHAT) -> int | None:
    return asyncio.run(make_in_time(server, Attack("a body", (post(path, body, HOSTILE),))))


def bodies_at_once(count: int, body: LargeBody) -> Callable[[Server], str]:
    name, path, value = body

    def run(server: Server) -> str:
        attack = Attack(name, (post(path, json.dumps(value).encode(), HOSTILE),))
        return shown(asyncio.run(make_all(server, [attack] * count, clients=count)))

    return run


def half_closed(server: Server) -> str:
    """Clients that close their sending side once they have asked: they are still to be answered."""
    request = post(CHAT, json.dumps(chat()).encode(), HOSTILE)
    statuses = asyncio.run(make_all(server, [Attack("half-closed", (request,), half_closes=True)] * 64))
    fault = status_fault(statuses, "200")
    require(fault is None, str(fault))
    return shown(statuses)


def patterns(server: Server) -> str:
    """A schema of 200 patterns, whose check has a limit of time."""
    each = {f"^(a|b)*x{{{i}}}$": {"type": "integer"} for i in range(1, 201)}
    began_s = time.monotonic()
    status, _ = ask(server, HOSTILE, CHAT, chat(guided_json={"type": "object", "patternProperties": each}))
    took_s = time.monotonic() - began_s
    require(took_s <= GRAMMAR_S + 1, f"a schema of 200 patterns took {took_s:.1f} s where {GRAMMAR_S:g} are the limit")
    return f"{status} after {took_s:.1f} s"


def crowd(requests: int, seed: int) -> Callable[[Server], str]:
    """Many at a time, drawn from a seed."""

    def run(server: Server) -> str:
        made = attacks(json.loads(server.get("/openapi.json")), MODEL, requests, seed, (HOSTILE,))
        began_s = time.monotonic()
        statuses = asyncio.run(make_all(server, made))
        return f"{requests} requests at {requests / (time.monotonic() - began_s):.0f} per second ({shown(statuses)})"

    return run


def leavers(server: Server) -> str:
    """Clients that ask for long work and leave: the work must end."""
    alone = server.metric("oscine:http_requests_in_progress")
    costly = [*slow_grammars(), ("long prompt", TEXT, {"prompt": "a b " * 60_000, "max_tokens": 1})]
    requests = [post(path, json.dumps(body).encode(), HOSTILE) for _, path, body in costly]
    made = [Attack("leaves", (request,), pause_s=0.3, leaves=True) for request in requests for _ in range(LEAVERS)]
    asyncio.run(make_all(server, made))
    ended = wait(lambda: server.metric("oscine:http_requests_in_progress") <= alone, LEFT_S)
    require(ended, "what clients asked for that have left goes on")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    status, answer = ask(server, HEALTHY, CHAT, chat(guided_json=schema))
    require(status == 200, f"an ordinary schema is answered with {status} {answer}")
    return f"{len(made)} clients left"


def bodies_held(server: Server) -> str:
    """Bodies that lack their last byte, more of them than the server may hold."""
    request = post(TEXT, json.dumps({"prompt": "a" * (BODY_BYTES - 100)}).encode(), HOSTILE)[:-1]

    async def hold() -> int:
        writers: list[asyncio.StreamWriter] = []
        for _ in range(BODIES_HELD):
            _, writer = await asyncio.open_connection(server.host, server.port)
            writers.append(writer)
            with contextlib.suppress(OSError):
                writer.write(request)
                await writer.drain()
        await asyncio.sleep(0.5)
        status, _ = await asyncio.to_thread(ask, server, HEALTHY, CHAT, chat())
        for writer in writers:
            writer.close()
        return status

    status = asyncio.run(hold())
    require(status == 200, f"{status} for a small request beside unfinished bodies")
    return f"{BODIES_HELD} of 4 MiB"


def keys_apart(server: Server) -> str:
    """One key finds no data of another key: responses, items, cached prompts."""
    secret = {"input": [{"type": "message", "id": "msg_chosen", "role": "user", "content": "secret " * 100}]}
    status, mine = ask(server, HEALTHY, RESPONSES, secret | {"max_output_tokens": 16})
    require(status == 200, f"{status} {mine}")
    path = f"{RESPONSES}/{mine['id']}"
    tried: list[tuple[str, str, Any]] = [
        ("GET", path, None),
        ("GET", f"{path}/input_items", None),
        ("POST", f"{path}/cancel", None),
    ]
    tried += [("DELETE", path, None), ("POST", RESPONSES, {"input": "?", "previous_response_id": mine["id"]})]
    for item in ("msg_chosen", mine["output"][0]["id"]):
        tried.append(("POST", RESPONSES, {"input": [{"type": "item_reference", "id": item}]}))
    for method, at, body in tried:
        status, answer = ask(server, HOSTILE, at, body, method)
        require(status in (400, 404), f"{method} {at} {body} of another key: {status} {answer}")
    cached = [
        ask(server, key, TEXT, {"prompt": "A prompt of several pages. " * 40, "max_tokens": 1})[1]["usage"]
        for key in (HEALTHY, HEALTHY, HOSTILE)
    ]
    _, own, other = ((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in cached)
    require(own > 0 and other == 0, f"{own} tokens of an own prompt were cached, {other} of another key's")
    return f"{len(tried)} ways to another key's responses are refused, no cached prompt is seen"


def connections_held(server: Server) -> str:
    """A client without a key holds all connections that it gets while the engine is killed."""
    before, restarts = Holdings.of(server), server.metric("oscine:engine_restarts_total")

    async def hold(ended: asyncio.Event, writers: dict[int, asyncio.StreamWriter]) -> None:
        """Opens one more each time; every third begins a request."""
        i = 0
        while not ended.is_set():
            i += 1
            if stale := writers.pop(i % (2 * MAX_CONNECTIONS), None):
                stale.close()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(server.host, server.port)
                writer.write(b"POST /v1/chat" if i % 3 == 0 else b"")
                writers[i % (2 * MAX_CONNECTIONS)] = writer
            await asyncio.sleep(0.001)

    def is_back() -> bool:
        return server.metric("oscine:engine_restarts_total") > restarts and is_ready(server)

    async def run() -> tuple[float, int]:
        ended, writers = asyncio.Event(), dict[int, asyncio.StreamWriter]()
        holding = asyncio.create_task(hold(ended, writers))
        while len(writers) < 1.5 * MAX_CONNECTIONS:
            await asyncio.sleep(0.01)
        os.kill(server.engine_pid, signal.SIGKILL)
        killed_s, probes = time.monotonic(), 0
        try:
            while not await asyncio.to_thread(is_back):
                require("live" in await asyncio.to_thread(server.get, "/v1/health/live"), "no liveness")
                require(time.monotonic() - killed_s < READY_S, "the engine does not come back")
                probes += 1
        finally:
            ended.set()
            await holding
            for writer in writers.values():
                writer.close()
        return time.monotonic() - killed_s, probes

    back_s, probes = asyncio.run(run())
    status, answer = ask(server, HEALTHY, CHAT, chat())
    require(status == 200, f"after the restart {status} {answer}")
    settle(server, before)
    return f"{probes} probes answered, the engine was back after {back_s:.1f} s, no leaks"


def handshakes_held(server: Server) -> str:
    """TLS connections that never begin a handshake, at a server of at most 100 connections."""
    with contextlib.ExitStack() as held:
        for i in range(400):
            connection = held.enter_context(socket.create_connection((server.host, server.port)))
            connection.sendall(b"\x16\x03\x01\x02\x00" if i % 2 else b"")
        require("live" in server.get("/v1/health/live"), "no liveness")
        open_ones = server.metric("oscine:http_connections")
    require(open_ones <= 100 + 64, f"{open_ones:.0f} connections of at most 100")
    return f"of 400 handshakes that never begin {open_ones:.0f} are held, and probes answered"


def _resident_bytes(server: Server) -> int:
    process = psutil.Process(server.pid)
    return int(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))


def hostile_requests(server: Server, count: int, seed: int = 0) -> str:
    """At the embedded model. The first tenth is a warm-up, in which memory may grow to its normal size."""
    made = attacks(json.loads(server.get("/openapi.json")), server.model(), count, seed)
    engine, warm_up = server.engine_pid, max(count // 10, 1)
    statuses = asyncio.run(make_all(server, made[:warm_up]))
    wait(lambda: not server.metric("oscine:num_requests_running"), SETTLE_S)
    time.sleep(0.5)
    before, before_bytes = Holdings.of(server), _resident_bytes(server)
    statuses += asyncio.run(make_all(server, made[warm_up:]))
    require(server.engine_pid == engine, "an attack ended the engine")
    require(answers_right(server), "a wrong answer after the attacks")
    settle(server, before)
    growth = _resident_bytes(server) - before_bytes
    require(growth <= MODEL_GROWTH_BYTES, f"memory has grown by {growth >> 20} MiB from {before_bytes >> 20} MiB")
    return f"{count} requests answered ({shown(statuses)}), memory {before_bytes >> 20} {growth >> 20:+d} MiB, no leaks"
