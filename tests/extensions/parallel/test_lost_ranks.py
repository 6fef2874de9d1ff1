"""A server whose model has two ranks, of which one is killed or stopped while it answers, and when it is idle."""

import os
import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from oscine.extensions.parallel.liveness import HUNG_S
from tests.children import children, shared_files
from tests.server import ServerProcess
from tests.waiting import wait_until

OPTIONS = ("--device", "cpu", "--tensor-parallel-size", "2", "--kv-cache-bytes", "64M")
ENDLESS: dict[str, Any] = {"model": "oscine-nano", "prompt": "abc", "max_tokens": 8000, "ignore_eos": True}
PATIENCE_S = 20.0  # of a test, beyond what a user waits
RESTART_S = 90.0  # of a machine that is busy with other things
SHORT: dict[str, Any] = {"model": "oscine-nano", "prompt": "abc", "max_tokens": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*OPTIONS) as server:
        yield server
        processes = server.processes()
    psutil.wait_procs(processes, timeout=10)
    assert not [one for one in processes if is_alive(one)]


def is_alive(process: psutil.Process) -> bool:
    """An orphan that has ended may wait for its new parent to take note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks(server: ServerProcess) -> list[psutil.Process]:
    """All of them, rank 0 first."""
    return [server.engine, *children("oscine.extensions.parallel.start.rank", server.engine)]


def answers(server: ServerProcess) -> bool:
    try:
        return server.post("/v1/completions", SHORT)["usage"]["completion_tokens"] == 4
    except urllib.error.HTTPError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_requests_fail_and_the_server_comes_back(server: ServerProcess, rank: int, number: signal.Signals) -> None:
    wait_until(lambda: answers(server), "an answer")
    before = ranks(server)
    assert not shared_files(before)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(server.post, "/v1/completions", ENDLESS)
        server.wait_running(1)
        os.kill(before[rank].pid, number)
        with pytest.raises(urllib.error.HTTPError) as failed:
            asked.result(timeout=(2 if number == signal.SIGKILL else HUNG_S) + PATIENCE_S)
    assert failed.value.code == 503
    assert "the engine" in failed.value.read().decode()
    wait_until(lambda: answers(server), "an answer after the loss", RESTART_S)
    wait_until(lambda: not any(map(is_alive, before)), "the end of the ranks before")


def test_a_rank_that_is_killed_while_nothing_runs_costs_no_request(server: ServerProcess) -> None:
    wait_until(lambda: answers(server), "an answer")
    before = ranks(server)
    before[1].kill()
    wait_until(lambda: not is_alive(before[0]), "the end of the engine")
    wait_until(lambda: answers(server), "an answer after the loss", RESTART_S)


def test_no_rank_outlives_the_server() -> None:
    with ServerProcess(*OPTIONS) as server:
        all_ranks, api = ranks(server), psutil.Process(server.pid)
        assert len(all_ranks) == 2
        api.kill()
        wait_until(lambda: not any(map(is_alive, all_ranks)), "the end of the ranks")
