"""Hostile clients must not stop the streams of others, exhaust the server's memory, or block its work.

    python -m benchmarks.serving.siege [--requests 10000] [--seed 0]

Most attacks run against a fake executor of known pace, beside streams with a measured longest gap; the others run
against the embedded model. Loopback only. Prints one line per broken promise, and then ends with status 1. Every attack
has a name and a seed, so that a harmful one can be repeated.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.attacks import Attack, attacks, post
from benchmarks.serving.healthy_streams import HealthyStreams
from benchmarks.serving.promises import (
    SETTLE_S,
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
from benchmarks.serving.shapes import CHAT, RESPONSES, TEXT, chat, shapes, slow_grammars
from oscine.engine.process.descriptors import raise_descriptor_limit

GAP_S = 0.1  # that one request may add to the longest gap of other streams
AGAIN = 3  # repetitions of an attack whose effect may come from another process on the machine
STREAMS = 6
STEP_S = 0.01
CLIENTS = 32  # hostile ones at a time
ATTACK_S = 60.0  # longer than any answer takes
READY_S = 60.0
PEAK_BYTES = 1 << 30  # of the API process, above its idle memory: bodies may take half of it
GROWTH_BYTES = 128 << 20  # of the API process after all attacks
MODEL_GROWTH_BYTES = 192 << 20  # of both processes, of the embedded model, under thousands of attacks
MAX_CONNECTIONS = 600
BODIES_HELD = 160
LEAVERS = 12
LEFT_S = 30.0  # until the work of departed clients has ended, also work in threads that cannot be interrupted
MODEL = "m"
WARM_UP = 200
HEALTHY, HOSTILE = (f"Authorization: Bearer {key}".encode() for key in ("healthy-key", "hostile-key"))
OPTIONS = ["--executor", "fake", "--fake-step-s", str(STEP_S), "--max-num-seqs", "64", "--cache-salt-by-key"]
OPTIONS += [
    "--served-model-name",
    MODEL,
    "--api-key=healthy-key",
    "--api-key=hostile-key",
    "--max-connections",
    str(MAX_CONNECTIONS),
]
TLS_FOLDER = Path(__file__).parents[2] / "tests" / "api" / "tls"


# ---- one request, many requests ----


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


async def make_in_time(server: Server, attack: Attack) -> int | None:
    """Raises Broken for an answer with status 500, or for none in time."""
    try:
        async with asyncio.timeout(ATTACK_S):
            status = await make(server, attack)
    except TimeoutError:
        raise Broken(f"no answer to {attack.name}") from None
    require(status != 500, f"500 for {attack.name}: {attack.pieces[0][:2000]!r}")
    return status


async def make_all(server: Server, made: Iterable[Attack]) -> Counter[str]:
    """The number of answers per status."""
    statuses: Counter[str] = Counter()
    queue = iter(made)

    async def client() -> None:
        for attack in queue:
            statuses[str(await make_in_time(server, attack))] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses


def shown(statuses: Counter[str]) -> str:
    return ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))


def ask(
    server: Server, key: bytes, path: str, body: Any = None, method: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and answer."""
    headers = {"Authorization": key.decode().partition(": ")[2], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ATTACK_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# ---- what the attacked server is measured by ----


class Memory:
    """Of the API process: at rest, and its peak since."""

    def __init__(self, server: Server) -> None:
        self._process = Path(f"/proc/{server.pid}")
        self.rest_bytes = self._field("VmRSS")
        (self._process / "clear_refs").write_text("5")  # the peak begins anew

    def _field(self, name: str) -> int:
        lines = dict(line.split(":", 1) for line in (self._process / "status").read_text().splitlines())
        return int(lines[name].split()[0]) << 10

    def check(self) -> str:
        """Raises Broken above the bounds."""
        peak = self._field("VmHWM") - self.rest_bytes
        require(peak <= PEAK_BYTES, f"memory rose by {peak >> 20} MiB, more than {PEAK_BYTES >> 20}")
        wait(lambda: self._field("VmRSS") - self.rest_bytes <= GROWTH_BYTES, SETTLE_S)
        growth = self._field("VmRSS") - self.rest_bytes
        require(growth <= GROWTH_BYTES, f"{growth >> 20} MiB of memory are kept, more than {GROWTH_BYTES >> 20}")
        return f"memory of the API {self.rest_bytes >> 20} MiB, peak {peak >> 20:+d}, afterwards {growth >> 20:+d}"


def late(server: Server) -> str:
    """The smallest bound that the lag of the event loop has kept, by its own metric since its start."""
    prefix = 'oscine:event_loop_lag_seconds_bucket{le="'
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(prefix)]
    counts = [(line.removeprefix(prefix).split('"')[0], float(line.rsplit(" ", 1)[1])) for line in lines]
    bound = next(bound for bound, count in counts if count == counts[-1][1])
    return bound if bound == "+Inf" else f"{1e3 * float(bound):g} ms"


# ---- promises ----


def each_shape(server: Server, streams: HealthyStreams, made: Iterable[Attack]) -> str:
    """One shape after the other. A shape that adds a long gap to the streams each time is broken."""
    time.sleep(2)
    alone_s = streams.longest_gap_s()
    found: dict[str, float] = {}
    for attack in made:
        for _ in range(AGAIN):
            asyncio.run(make_in_time(server, attack))
            gap_s = streams.longest_gap_s()
            found[attack.name] = min(gap_s, found.get(attack.name, gap_s))
            if gap_s <= alone_s + GAP_S:
                break
    worst = sorted(found, key=found.__getitem__, reverse=True)
    said = ", ".join(f"{name} {1e3 * found[name]:.0f} ms" for name in worst[:5])
    long = [name for name in worst if found[name] > alone_s + GAP_S]
    require(not long, f"{len(long)} shapes stop other streams: {said}; they are {1e3 * alone_s:.0f} ms alone")
    return f"{len(found)} shapes, longest gap {said}, {1e3 * alone_s:.0f} ms without"


def crowd(server: Server, streams: HealthyStreams, count: int, seed: int) -> str:
    """Many at a time. They share the cores with the streams, so the gap is reported but not judged."""
    made = attacks(json.loads(server.get("/openapi.json")), MODEL, count, seed, (HOSTILE,))
    started_s = time.monotonic()
    statuses = asyncio.run(make_all(server, made))
    rate = count / (time.monotonic() - started_s)
    gap_s = streams.longest_gap_s()
    return f"{count} requests at {rate:.0f} per second ({shown(statuses)}), longest gap {1e3 * gap_s:.0f} ms"


def leavers(server: Server, streams: HealthyStreams) -> str:
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
    return f"{len(made)} clients left, longest gap {1e3 * streams.longest_gap_s():.0f} ms"


def bodies_held(server: Server, streams: HealthyStreams) -> str:
    """Bodies that lack their last byte, more of them than the server may hold."""
    body = json.dumps({"prompt": "a" * ((4 << 20) - 100)}).encode()
    request = post(TEXT, body, HOSTILE)[:-1]

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
    return f"{BODIES_HELD} of 4 MiB, longest gap {1e3 * streams.longest_gap_s():.0f} ms"


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


def handshakes_held() -> str:
    """TLS connections that never begin a handshake."""
    certificate = TLS_FOLDER / "certificate.pem"
    handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate))
    urllib.request.install_opener(urllib.request.build_opener(handler))
    tls = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(TLS_FOLDER / "key.pem")]
    with Server("--log-level", "error", *OPTIONS[:2], "--max-connections", "100", *tls) as server:
        with contextlib.ExitStack() as held:
            for i in range(400):
                connection = held.enter_context(socket.create_connection((server.host, server.port)))
                connection.sendall(b"\x16\x03\x01\x02\x00" if i % 2 else b"")
            require("live" in server.get("/v1/health/live"), "no liveness")
            open_ones = server.metric("oscine:http_connections")
        require(open_ones <= 100 + 64, f"{open_ones:.0f} connections of at most 100")
    return f"of 400 handshakes that never begin {open_ones:.0f} are held, and probes answered"


def resident_bytes(server: Server) -> int:
    process = psutil.Process(server.pid)
    return int(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))


def hostile_requests(server: Server, count: int, seed: int = 0) -> str:
    """The first tenth is a warm-up, in which memory may grow to its normal size. Raises Broken."""
    made = attacks(json.loads(server.get("/openapi.json")), server.model(), count, seed)
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
    require(growth <= MODEL_GROWTH_BYTES, f"memory has grown by {growth >> 20} MiB from {before_bytes >> 20} MiB")
    return f"{count} requests answered ({shown(statuses)}), memory {before_bytes >> 20} {growth >> 20:+d} MiB, no leaks"


def beside_streams(server: Server, requests: int, seed: int) -> int:
    """All attacks on one server with a fake executor. Returns 1 if a promise was broken."""
    document = json.loads(server.get("/openapi.json"))
    asyncio.run(make_all(server, attacks(document, MODEL, WARM_UP, seed + 1, (HOSTILE,))))
    with HealthyStreams(server, STREAMS, HEALTHY) as streams:
        memory = Memory(server)
        broken = keep(
            {
                "each shape": lambda: each_shape(server, streams, shapes(seed, HOSTILE)),
                "clients that leave": lambda: leavers(server, streams),
                "unfinished bodies": lambda: bodies_held(server, streams),
                "many at a time": lambda: crowd(server, streams, requests, seed),
                "event loop": lambda: f"never later than {late(server)}",
            }
        )
    after = {
        "keys": lambda: keys_apart(server),
        "memory": memory.check,
        "connections": lambda: connections_held(server),
    }
    return keep(after) | broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    args = parser.parse_args()
    raise_descriptor_limit()
    with Server("--log-level", "error", *OPTIONS) as server:
        broken = beside_streams(server, args.requests, args.seed)
    others = {
        "TLS": handshakes_held,
        "the model": lambda: with_server(lambda server: hostile_requests(server, args.requests // 10, args.seed)),
    }
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    return keep(others) | broken


if __name__ == "__main__":
    sys.exit(main())
