"""The promises of `make chaos` and `make attack`, in small and without a clock."""

import asyncio
import json
import math

import pytest

from benchmarks.serving.chaos import engine_killed, everything_killed
from benchmarks.serving.promises import SETTLE_S, Holdings, settle, wait, with_server
from benchmarks.serving.server import Server
from benchmarks.serving.siege import clients, http_attacks
from benchmarks.serving.siege.__main__ import OPTIONS
from benchmarks.serving.siege.measures import Memory
from benchmarks.serving.siege.requests import attacks
from benchmarks.serving.siege.shapes import floods


@pytest.mark.needs("apis")
def test_a_killed_engine_and_hostile_clients_leave_nothing_behind() -> None:
    def both(server: Server) -> str:
        killed = engine_killed(server, streams=9, rounds=1, within_s=math.inf)
        return killed + http_attacks.hostile_requests(server, 200, seed=7)

    assert with_server(both).count("no leaks") == 2


@pytest.mark.slow  # test_response_store.py kills the same processes, of a server with a fake executor
def test_a_stored_response_survives_the_death_of_everything() -> None:
    assert everything_killed()


@pytest.mark.needs("apis")
def test_floods_leave_memory_and_other_clients_alone() -> None:
    def attacked(server: Server) -> str:
        made = attacks(json.loads(server.get("/openapi.json")), clients.MODEL, 100, 3, (clients.HOSTILE,))
        asyncio.run(clients.make_all(server, made))
        memory, before = Memory(server), Holdings.of(server)
        asyncio.run(clients.make_all(server, floods()))
        assert wait(lambda: not server.metric("oscine:num_requests_running"), SETTLE_S)
        settle(server, before)
        _, fault = memory.judge(1 << 30)
        assert fault is None
        return http_attacks.keys_apart(server) + http_attacks.connections_held(server)

    assert with_server(attacked, *OPTIONS)


@pytest.mark.needs("apis")
def test_handshakes_that_never_begin_keep_no_probe_waiting() -> None:
    assert with_server(http_attacks.handshakes_held, *OPTIONS, "--max-connections", "100", *http_attacks.TLS)
