"""The promises of `make chaos` and `make attack`, in small and without a clock."""

import asyncio
import json
import math

import pytest

from benchmarks.serving import siege
from benchmarks.serving.attacks import attacks
from benchmarks.serving.chaos import engine_killed, everything_killed
from benchmarks.serving.promises import SETTLE_S, Holdings, settle, wait, with_server
from benchmarks.serving.server import Server
from benchmarks.serving.shapes import floods


def test_a_killed_engine_and_hostile_clients_leave_nothing_behind() -> None:
    def both(server: Server) -> str:
        killed = engine_killed(server, streams=9, rounds=1, within_s=math.inf)
        return killed + siege.hostile_requests(server, 200, seed=7)

    assert with_server(both).count("no leaks") == 2


@pytest.mark.slow  # test_response_store.py kills the same processes, of a server with a fake executor
def test_a_stored_response_survives_the_death_of_everything() -> None:
    assert everything_killed()


def test_floods_leave_memory_and_other_clients_alone() -> None:
    def attacked(server: Server) -> str:
        made = attacks(json.loads(server.get("/openapi.json")), siege.MODEL, 100, 3, (siege.HOSTILE,))
        asyncio.run(siege.make_all(server, made))
        memory, before = siege.Memory(server), Holdings.of(server)
        asyncio.run(siege.make_all(server, floods()))
        assert wait(lambda: not server.metric("oscine:num_requests_running"), SETTLE_S)
        settle(server, before)
        return memory.check() + siege.keys_apart(server) + siege.connections_held(server)

    assert with_server(attacked, *siege.OPTIONS)


def test_handshakes_that_never_begin_keep_no_probe_waiting() -> None:
    assert siege.handshakes_held()
