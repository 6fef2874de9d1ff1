"""A worker ends, asked or unasked, while a frontend that may migrate requests has streams on it."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.dynamo.fleet import DynamoWorker, Fleet
from tests.waiting import wait_until

STORY = {"role": "user", "content": "What is 27 + 58?"}
LONG = {"max_tokens": 300, "extra_body": {"ignore_eos": True}, "logprobs": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Fleet]:
    """One worker for each test to end, and one that is left."""
    options = ("--migration-limit", "3")
    with Fleet(tmp_path_factory.mktemp("fleet"), vocabulary, *["aggregated"] * 4, frontend=options) as fleet:
        yield fleet


def tokens(chunks: Any) -> list[str]:
    return [
        e.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for e in chunk.choices[0].logprobs.content
    ]


def running(fleet: Fleet) -> DynamoWorker:
    """The worker that has the one request there is."""
    found: list[DynamoWorker] = []

    def look() -> bool:
        live = [worker for worker in fleet.workers if worker.exit_code is None]
        found[:] = [worker for worker in live if worker.metric("num_requests_running")]
        return len(found) == 1

    wait_until(look, "a running request")
    return found[0]


def test_a_stream_goes_on_where_it_was_cut(fleet: Fleet) -> None:
    whole = tokens(fleet.ask(STORY, stream=True, **LONG))
    assert len(whole) == LONG["max_tokens"]

    stream = fleet.ask(STORY, stream=True, **LONG)
    begin = tokens([next(stream) for _ in range(20)])
    lost = running(fleet)
    for process in lost.family():
        process.kill()
    assert begin + tokens(stream) == whole
    assert lost.wait() == -signal.SIGKILL


def test_a_worker_ends_with_its_engine(fleet: Fleet) -> None:
    """And a sampled text goes on as well, with its seed."""
    sampled = LONG | {"temperature": 1, "seed": 7}
    whole = tokens(fleet.ask(STORY, stream=True, **sampled))
    stream = fleet.ask(STORY, stream=True, **sampled)
    begin = tokens([next(stream) for _ in range(20)])
    lost = running(fleet)
    lost.engine().kill()
    assert begin + tokens(stream) == whole
    assert lost.wait() == 1
    assert "oscine: error: the engine process was killed by signal 9" in lost.log.read_text()
    assert fleet.ask(STORY).choices[0].message.content == "27 + 58 = 85."


def test_a_worker_that_is_asked_to_stop_lets_its_streams_end(fleet: Fleet) -> None:
    stream = fleet.ask(STORY, stream=True, **LONG)
    begin = tokens([next(stream) for _ in range(20)])
    leaving = running(fleet)
    leaving.signal(signal.SIGTERM)
    assert len(begin + tokens(stream)) == LONG["max_tokens"]
    assert leaving.wait() == 0
    assert fleet.ask(STORY).choices[0].message.content == "27 + 58 = 85."
