"""The promises of `make chaos`, in small and without a clock."""

import math

from benchmarks.serving.chaos import engine_killed, everything_killed, hostile_requests, with_server
from benchmarks.serving.server import Server


def test_a_killed_engine_and_hostile_clients_leave_nothing_behind() -> None:
    def both(server: Server) -> str:
        return engine_killed(server, streams=9, rounds=1, within_s=math.inf) + hostile_requests(server, 200, seed=7)

    assert with_server(both).count("no leaks") == 2


def test_a_stored_response_survives_the_death_of_everything() -> None:
    assert everything_killed()
