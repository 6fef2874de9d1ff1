"""Hostile clients must not stop the streams of others, exhaust the server's memory, or block its work.

    python -m benchmarks.serving.siege [--requests 6000] [--seed 0] [--gap-s 0.1] [--only NAME ...] [--minutes 0]

Most attacks run against a fake executor of known pace. Beside each of them healthy streams run, whose longest gap is
judged. Others have a server of their own. Loopback only. Prints one line per attack. Exits with status 1 if an
attack broke a promise. Attacks come from a seed, so that a harmful one can be repeated.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.serving.promises import keep, with_server
from benchmarks.serving.server import Server
from benchmarks.serving.siege import socket_attacks
from benchmarks.serving.siege.clients import GREEDY, HEALTHY, HOSTILE, MODEL, make_all
from benchmarks.serving.siege.file_attacks import (
    HOSTILE_FILES,
    MAX_FILES_BYTES,
    batch_of,
    batches_together,
    planted_links,
    uploads_together,
)
from benchmarks.serving.siege.ground import Ground, Row, about_floor, floor_gap_s, single
from benchmarks.serving.siege.http_attacks import (
    BODIES_OF_1_MB,
    BODY_OF_4_MB,
    MAX_CONNECTIONS,
    TLS,
    bodies_at_once,
    bodies_held,
    connections_held,
    crowd,
    deep_values,
    half_closed,
    handshakes_held,
    hostile_requests,
    huge_numbers,
    keys_apart,
    leavers,
    one_shape,
    patterns,
    unknown_fields,
)
from benchmarks.serving.siege.mcp_attack import TOOL_TIMEOUT_S, listing_of
from benchmarks.serving.siege.mcp_servers import HOSTILE as HOSTILE_MCP
from benchmarks.serving.siege.mcp_servers import small_tools
from benchmarks.serving.siege.measures import Memory
from benchmarks.serving.siege.requests import attacks
from benchmarks.serving.siege.shapes import CHAT, MESSAGES, RESPONSES, shapes
from benchmarks.serving.siege.streams import HealthyStreams
from benchmarks.serving.siege.verdicts import allowed_gap_s
from oscine.engine.process.descriptors import raise_descriptor_limit

STREAMS = 6
STEP_S = 0.01
WARM_UP = 200
BODIES_BYTES = 1 << 30  # memory of attacks by large bodies: the server lets bodies take half of it
NICE = 5  # the attackers give way to the server, whose cores they share
OPTIONS = ["--executor", "fake", "--fake-step-s", str(STEP_S), "--max-num-seqs", "64", "--cache-salt-by-key"]
OPTIONS += ["--served-model-name", MODEL, "--max-connections", str(MAX_CONNECTIONS), "--log-level", "error"]
OPTIONS += ["--allow-mcp-urls", "--tool-timeout-s", str(TOOL_TIMEOUT_S), "--files-max-bytes", str(MAX_FILES_BYTES)]
OPTIONS += [f"--api-key={key.decode().rpartition(' ')[2]}" for key in (HEALTHY, HOSTILE, GREEDY)]


def table(files: Path, requests: int, seed: int) -> Iterable[Row]:
    """Every attack beside healthy streams. Each must keep these promises: no gap of a stream and no lag of the event
    loop above the limit, memory below the row's bound and given back, no file changed outside the server's folders,
    and what the function itself requires. `files`: the server's folder for files."""
    yield Row("shapes", ((s.name, one_shape(s)) for s in shapes(seed, HOSTILE)), BODIES_BYTES)  # no answer is 500
    counts = (300_000, 130_000)  # more than is taken, and not quite as many
    paths = (CHAT, RESPONSES, MESSAGES)
    yield Row("unknown fields", ((f"{n} {path}", unknown_fields(path, n)) for n in counts for path in paths))
    yield single("deep values", deep_values)
    yield single("huge numbers", huge_numbers)
    yield single("twelve bodies at once", bodies_at_once(12, BODY_OF_4_MB), BODIES_BYTES)
    yield Row("forty bodies at once", ((b[0], bodies_at_once(40, b)) for b in BODIES_OF_1_MB), BODIES_BYTES)
    yield single("unfinished bodies", bodies_held, BODIES_BYTES)  # a small request is answered
    yield single("half-closed clients", half_closed)  # all are answered
    yield single("200 patterns", patterns)  # within the limit of time
    yield single("clients that leave", leavers, BODIES_BYTES)  # their work ends
    yield single("many at a time", crowd(requests, seed), BODIES_BYTES)
    yield Row("batch files", ((name, batch_of(content)) for name, content in HOSTILE_FILES.items()))  # each ends
    yield single("uploads at once", uploads_together(files))  # no more than the quota
    yield single("batches at once", batches_together)  # no more than the quota
    yield Row("MCP servers", ((name, listing_of(answer)) for name, answer in HOSTILE_MCP.items()))  # within the timeout
    yield single("16 MCP servers", listing_of(small_tools, 16))
    yield single("keys", keys_apart)  # no data of another key


def beside_streams(root: Path, requests: int, seed: int, gap_s: float, wanted: Callable[[str], bool]) -> int:
    """The attacks of the table on one server, and at last the death of its engine. Returns 1 for a broken promise."""
    folder, outside = root / "server", root / "outside"
    for path in (folder / "tmp", folder / "files", outside):
        path.mkdir(parents=True)
    (outside / "file").write_text("not the server's")
    environment = {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    with Server(*OPTIONS, "--files-dir", str(folder / "files"), environment=environment) as server:
        os.nice(NICE)
        document = json.loads(server.get("/openapi.json"))
        asyncio.run(make_all(server, attacks(document, MODEL, WARM_UP, seed + 1, (HOSTILE,))))
        with HealthyStreams(server, STREAMS, HEALTHY) as streams:
            floor_s = floor_gap_s(streams)
            print(about_floor(floor_s, gap_s), flush=True)
            memory = Memory(server)
            ground = Ground(server, streams, allowed_gap_s(gap_s, floor_s), outside, memory)
            rows = [row for row in table(folder / "files", requests, seed) if wanted(row.name)]
            broken = keep({row.name: partial(ground.attack, row) for row in rows})
        after = {"memory": memory.after_all, "connections": lambda: connections_held(server)}  # which ends the streams
        return keep({name: run for name, run in after.items() if wanted(name)}) | broken


def handshakes(root: Path, gap_s: float) -> str:
    """At a server with TLS."""
    outside = root / "outside of TLS"
    outside.mkdir()
    with (
        Server(*OPTIONS, "--max-connections", "100", *TLS) as server,
        HealthyStreams(server, STREAMS, HEALTHY) as streams,
    ):
        allowed_s = allowed_gap_s(gap_s, floor_gap_s(streams, 1.0))
        return Ground(server, streams, allowed_s, outside, Memory(server)).attack(single("TLS", handshakes_held))


def sockets(root: Path, seed: int, gap_s: float, minutes: float) -> int:
    """WebSockets, at a server that takes many: once, and again on the same server until `minutes` are over.
    Returns 1 for a broken promise."""
    outside = root / "outside of sockets"
    outside.mkdir()
    most = str(socket_attacks.MAX_CONNECTIONS)
    end_s = time.monotonic() + 60 * minutes
    with (
        Server(*OPTIONS, "--max-connections", most) as server,
        HealthyStreams(server, STREAMS, HEALTHY) as streams,
    ):
        allowed_s = allowed_gap_s(gap_s, floor_gap_s(streams, 1.0))
        memory = Memory(server)
        ground = Ground(server, streams, allowed_s, outside, memory)
        broken = keep({row.name: partial(ground.attack, row) for row in socket_rows(seed)})
        while time.monotonic() < end_s:
            seed += 1
            broken |= keep({row.name: partial(ground.attack, row) for row in socket_rows(seed)})
        return broken | keep({"memory after sockets": memory.after_all})


def socket_rows(seed: int) -> tuple[Row, ...]:
    return (
        single("idle sockets", socket_attacks.idle_sockets),  # and they may ask
        single("busy sockets", socket_attacks.busy_sockets),  # the same text for all
        single("slow sockets", socket_attacks.slow_sockets),  # their work ends when they leave
        single("unfinished messages", socket_attacks.unfinished_messages, BODIES_BYTES),
        single("broken frames", socket_attacks.broken_frames(seed)),  # close their own connection alone
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="requests in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    parser.add_argument("--gap-s", type=float, default=0.1, help="longest gap of a stream (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of attacks, or parts of them (default: all)")
    parser.add_argument("--minutes", type=float, default=0.0, help="of WebSockets (default: each attack once)")
    args = parser.parse_args()
    raise_descriptor_limit()
    began_s = time.monotonic()

    def wanted(name: str) -> bool:
        return args.only is None or any(part in name for part in args.only)

    def model(server: Server) -> str:
        return hostile_requests(server, args.requests // 10, args.seed)

    with tempfile.TemporaryDirectory(prefix="siege-") as folder:
        root = Path(folder)
        broken = beside_streams(root, args.requests, args.seed, args.gap_s, wanted)
        others = {
            "handshakes": lambda: handshakes(root, args.gap_s),
            "planted links": lambda: planted_links(root / "links"),
            "the model": lambda: with_server(model),
        }
        broken |= keep({name: run for name, run in others.items() if wanted(name)})
        if wanted("sockets"):
            broken |= sockets(root, args.seed, args.gap_s, args.minutes)
    load, took_s = os.getloadavg()[0], time.monotonic() - began_s
    print(f"{took_s:.0f} s; load of the machine: {load:.1f}, on {os.cpu_count()} cores")
    return broken


if __name__ == "__main__":
    sys.exit(main())
