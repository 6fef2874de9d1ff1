"""/sleep and /wake_up of a real server with the embedded model on a CPU."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from oscine.cli.serve.read_options import make_config
from oscine.extensions.models.sleep.allowed import check_sleep
from oscine.settings.option import OptionError
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess
from tests.waiting import DEADLINE_S, wait_until

# Of one page group, 64 MiB of KV cache, which a long prompt fills in part
OPTIONS = ("--enable-sleep-mode", "--date", "2025-08-05", "--log-level", "warning", "--kv-cache-bytes", "64MiB")
LONG = "one two three four five six seven eight nine ten " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*OPTIONS) as server:
        yield server


def ask(server: ServerProcess, question: str = "What is 27 + 58?", max_tokens: int = 200) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        return client.chat.completions.create(
            model="oscine-nano", messages=messages, temperature=0, max_completion_tokens=max_tokens
        )


def post(server: ServerProcess, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=DEADLINE_S)


def sleeps(server: ServerProcess) -> bool:
    answer = httpx.get(f"{server.url}/is_sleeping").json()
    assert answer.keys() == {"is_sleeping"}
    return bool(answer["is_sleeping"])


def test_a_model_sleeps_and_wakes_up_and_answers_as_before(server: ServerProcess) -> None:
    before = ask(server).choices[0].message.content
    ask(server, LONG, 1)
    assert ask(server, LONG, 1).usage.prompt_tokens_details.cached_tokens > 900
    engine = server.engine
    held = engine.memory_info().rss
    assert not sleeps(server)
    for _ in range(2):  # the second one changes nothing
        answer = post(server, "/sleep?level=1")
        assert (answer.status_code, answer.json()) == (200, {"is_sleeping": True})
    assert sleeps(server)
    assert held - engine.memory_info().rss > 1 << 20, "the pages still take memory"
    assert server.metric("oscine:kv_slots_cached") == 0

    with pytest.raises(openai.InternalServerError, match="POST /wake_up") as caught:
        ask(server)
    assert (caught.value.status_code, caught.value.code) == (503, "asleep")
    health = httpx.get(f"{server.url}/v1/health/ready")
    assert (health.status_code, health.json()["status"]) == (503, "asleep")
    assert httpx.get(f"{server.url}/v1/health/live").status_code == 200

    for _ in range(2):
        answer = post(server, "/wake_up")
        assert (answer.status_code, answer.json()) == (200, {"is_sleeping": False})
    assert not sleeps(server)
    assert httpx.get(f"{server.url}/v1/health/ready").status_code == 200
    again = ask(server, LONG, 1)
    assert again.usage.prompt_tokens_details.cached_tokens == 0, "a page that was dropped is found"
    assert ask(server).choices[0].message.content == before
    assert engine.is_running(), "the engine was started again"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/sleep?level=2", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=weights", "tags"),
    ],
)
def test_what_is_not_offered_is_refused(server: ServerProcess, path: str, word: str) -> None:
    answer = post(server, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == word
    assert not sleeps(server)


def test_an_unknown_model_is_404(server: ServerProcess) -> None:
    for path in ("/sleep", "/wake_up"):
        assert post(server, f"{path}?model=other").status_code == 404
    assert post(server, "/sleep?model=oscine-nano").status_code == 200
    assert post(server, "/wake_up?model=oscine-nano").status_code == 200


def test_requests_end_before_the_model_sleeps_unless_they_are_aborted(server: ServerProcess) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        for mode, reason in (("wait", "length"), ("abort", None)):
            answer = pool.submit(post, server, "/v1/completions", body)
            server.wait_running(1)
            slept = post(server, f"/sleep?mode={mode}")
            assert slept.status_code == 200, slept.text
            if reason is not None:
                assert answer.result().json()["choices"][0]["finish_reason"] == reason
            else:
                assert answer.result().status_code == 503
            assert post(server, "/wake_up").status_code == 200


def test_an_engine_that_dies_asleep_comes_back(server: ServerProcess) -> None:
    assert post(server, "/sleep").status_code == 200
    server.engine.send_signal(signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{server.url}/v1/health/ready").status_code == 200, "a new engine")
    assert ask(server).choices
    assert post(server, "/sleep").status_code == 200
    assert post(server, "/wake_up").status_code == 200


def test_without_the_option_it_is_refused(model_folder: Path) -> None:
    with ScriptedServer(model_folder) as server:
        for path in ("/sleep", "/wake_up"):
            answer = server.post(path, b"")
            assert answer.status_code == 400
            assert "--enable-sleep-mode" in answer.json()["error"]["message"]
        assert json.loads(server.get("/is_sleeping").content) == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"tensor-parallel-size": 2}, "--tensor-parallel-size 1"),
        ({"data-parallel-size": 2}, "--data-parallel-size 1"),
        ({"experts-on-host": "auto"}, "--experts-on-host"),
    ],
)
def test_what_cannot_be_combined_with_it(given: dict[str, Any], word: str) -> None:
    config = make_config([{"enable-sleep-mode": True, **given}])
    with pytest.raises(OptionError, match=f"^--enable-sleep-mode .*{word}"):
        check_sleep(config.engine, config.server.data_parallel_size)
    check_sleep(make_config([given]).engine, 2)  # without it
