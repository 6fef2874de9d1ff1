"""An engine that hangs is killed and started again. An idle one and one in a long step do not hang."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.engine.process import supervisor
from oscine.engine.wire.stream import EngineDied
from tests.engine_process.harness import options, read, request, run, serving, tokens
from tests.extensions.parallel.watch_clock import TIMEOUT_S, WatchClock
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines


def test_an_engine_that_hangs_is_killed_and_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with serving(replace(options(folder, fake_step_s=0.02), engine_timeout_s=TIMEOUT_S)) as client:
            first = client.pid
            assert first is not None
            stream = client.submit(request("a", max_tokens=3000))
            await anext(stream)
            await clock.hang(first)
            with pytest.raises(EngineDied, match="did nothing for 600 s and was killed"):
                await read(stream)
            await client.wait_ready()
            assert client.pid != first
            assert client.restarts == 1
            assert len(tokens(await read(client.submit(request("again"))))) == 8

    run(test)


def test_an_engine_that_hangs_says_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_STACKS_S", 1e6)  # it ends by itself

    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with serving(replace(options(folder, fake_step_s=1e6), engine_timeout_s=TIMEOUT_S)) as client:
            stream = client.submit(request("a"))

            def is_killed() -> bool:  # what the engine said before the step may be heard after the first skip
                clock.skipped_s += TIMEOUT_S
                return client.restarts > 0

            await until(is_killed, "the end of the engine that hangs")
            with pytest.raises(EngineDied, match="did nothing"):
                await read(stream)

    run(test)
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks
    assert "engine/process/server.py" in stacks


def test_a_long_step_is_not_a_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step restarts the timeout: no step exceeds it, but all steps together do."""

    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with serving(replace(options(folder, fake_step_s=0.02), engine_timeout_s=TIMEOUT_S)) as client:
            stream = client.submit(request("a", max_tokens=3000))
            for _ in range(4):
                begun_s = clock.monotonic()
                await until(lambda begun_s=begun_s: client._heard_s >= begun_s, "news of a step")  # type: ignore[misc]
                await clock.skip(0.6 * TIMEOUT_S)
            stream.close()
            assert client.restarts == 0
            assert client.state == "ready"

    run(test)


def test_an_idle_engine_may_be_silent_until_it_has_a_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with serving(replace(options(folder), engine_timeout_s=TIMEOUT_S)) as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            clock.skipped_s += 10 * TIMEOUT_S
            stream = client.submit(request("a"))
            await clock.skip(0.9 * TIMEOUT_S)
            os.kill(client.pid, signal.SIGCONT)
            assert len(tokens(await read(stream))) == 8
            assert client.restarts == 0

    run(test)
