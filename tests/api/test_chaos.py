"""The promises of `make chaos`, in small and without a clock."""

import math

from benchmarks.serving.chaos import engine_killed, everything_killed, hostile_requests
from tests.server import ServerProcess


def test_a_killed_engine_and_hostile_clients_leave_nothing_behind() -> None:
    with ServerProcess("--log-level", "error") as server:
        assert engine_killed(server, streams=9, rounds=1, within_s=math.inf)
        assert hostile_requests(server, count=200, seed=7)


def test_a_stored_response_survives_the_death_of_everything() -> None:
    assert everything_killed()
