"""A server as an operator runs it: keys from a file, JSON logs, traces, CORS.

The text of prompts and answers is not logged.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.otlp_receiver import OtlpReceiver, attributes
from tests.api.raw_client import LONG_ANSWER, RawClient, chat_body
from tests.server import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("tracing")

SECRET = "the-cat-is-in-the-bag"
ORIGIN = "https://example.org"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEYS = [
    {"name": "team", "key": "sk-team"},
    {"name": "hashed", "sha256": hashlib.sha256(b"sk-hashed").hexdigest(), "priority": 3},
    {"name": "slow", "key": "sk-slow", "requests_per_minute": 2},
    {"name": "narrow", "key": "sk-narrow", "max_parallel": 2},
    {"name": "small", "key": "sk-small", "tokens_per_minute": 600},
]


@dataclass
class Operated:
    server: ServerProcess
    receiver: OtlpReceiver
    keys: Path
    log: Path

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        """The log's lines that have these values."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if wanted.items() <= line.items()]

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)

    def chat(self, key: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.server.url}/v1/chat/completions"
        return httpx.post(url, json=body or chat_body(max_tokens=5), headers=shown | headers, timeout=30)


@pytest.fixture(scope="module")
def operated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    keys, log = folder / "keys.yaml", folder / "log"
    keys.write_text(json.dumps(KEYS))  # JSON is YAML
    options = ["--executor", "fake", "--fake-step-s", "0.002", "--log-format", "json", "--cors-origins", ORIGIN]
    with OtlpReceiver() as receiver, log.open("wb") as stderr:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        options += ["--api-keys-file", str(keys), "--api-key", "sk-plain"]
        with ServerProcess(str(model_folder), *options, environment=environment, log=stderr) as server:
            yield Operated(server, receiver, keys, log)


def test_every_key_of_the_file_and_the_command_line_is_taken(operated: Operated) -> None:
    for key in ("sk-team", "sk-hashed", "sk-plain"):
        assert operated.chat(key).status_code == 200
        assert operated.chat("", None, **{"X-Api-Key": key}).status_code == 200
    for key in ("sk-tea", "sk-teams", str(KEYS[1]["sha256"]), ""):
        assert operated.chat(key).status_code == 401


def test_requests_a_minute(operated: Operated) -> None:
    answers = [operated.chat("sk-slow") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    with operated.client("sk-slow") as client:
        assert len(client.models.list().data) == 1  # a GET is no request of the key
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="any", prompt="a")
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")


def test_sequences_at_once(operated: Operated) -> None:
    assert operated.chat("sk-narrow", chat_body(n=3, max_tokens=1)).status_code == 400
    with RawClient(operated.server) as client:
        client.post(LONG_ANSWER | {"n": 2, "stream": True}, "Authorization: Bearer sk-narrow")
        client.read_until(b'"content":"O"')
        refused = operated.chat("sk-narrow")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "parallel")


def test_tokens_a_minute(operated: Operated) -> None:
    answers: list[httpx.Response] = []

    def refused() -> bool:
        answers.append(operated.chat("sk-small"))
        return answers[-1].status_code == 429

    with RawClient(operated.server) as client:
        client.post(LONG_ANSWER | {"stream": True}, "Authorization: Bearer sk-small")
        wait_until(refused, "a debt of tokens")
    assert answers[-1].json()["error"]["type"] == "tokens"
    assert int(answers[-1].headers["x-ratelimit-remaining-tokens"]) < 600
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_a_stream_has_the_headers_too(operated: Operated) -> None:
    body = chat_body(stream=True, max_tokens=2)
    assert operated.chat("sk-team", body).headers["x-request-id"]
    assert "x-ratelimit-limit-requests" not in operated.chat("sk-team", body).headers


def test_the_file_is_read_again_on_sighup(operated: Operated) -> None:
    server, before = operated.server, len(operated.lines(message="the API keys were read again"))
    new = [{"name": "late", "key": "sk-late"}, *(key for key in KEYS if key["name"] != "hashed")]
    operated.keys.write_text(json.dumps(new))
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: len(operated.lines(message="the API keys were read again")) > before, "the new keys")
    assert operated.chat("sk-late").status_code == 200
    assert operated.chat("sk-hashed").status_code == 401
    assert operated.chat("sk-plain").status_code == 200
    operated.keys.write_text("- {name: late, key: 5")
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: bool(operated.lines(level="error", logger="oscine.api.server")), "the complaint")
    assert operated.chat("sk-late").status_code == 200


def test_the_log_has_one_line_a_request_and_nothing_that_was_said(operated: Operated) -> None:
    body = chat_body(max_tokens=30, stream=True, n=2, ignore_eos=True)
    body["messages"] = [{"role": "user", "content": SECRET}]
    answer = operated.chat("sk-team", body, **{"X-Request-Id": "log-1"})
    assert answer.status_code == 200
    wait_until(lambda: bool(operated.lines(request_id="log-1")), "the line")
    (line,) = operated.lines(request_id="log-1")
    expected = {"level": "info", "key": "team", "method": "POST", "path": "/v1/chat/completions", "status": 200}
    expected |= {"completion_tokens": 60, "finish_reason": "length", "message": "POST /v1/chat/completions 200"}
    assert expected.items() <= line.items()
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["duration_s"]
    assert line["prompt_tokens"] > 2 * len(SECRET) / 4
    assert SECRET not in operated.log.read_text()
    operated.chat("sk-team", chat_body(max_tokens=-1), **{"X-Request-Id": "log-2"})
    wait_until(lambda: bool(operated.lines(request_id="log-2")), "the line of a bad request")
    assert operated.lines(request_id="log-2", status=400)
    operated.chat("none", **{"X-Request-Id": "log-3"})
    wait_until(lambda: bool(operated.lines(request_id="log-3", status=401, error="invalid_api_key")), "a refusal")
    assert "sk-" not in operated.log.read_text()


def test_a_client_that_left_is_logged(operated: Operated) -> None:
    with RawClient(operated.server) as client:
        client.post(LONG_ANSWER, "Authorization: Bearer sk-team", "X-Request-Id: left")
        operated.server.wait_running(1)
    wait_until(lambda: bool(operated.lines(request_id="left", status=499, finish_reason="abort")), "the line")


def test_probes_are_not_logged(operated: Operated) -> None:
    httpx.get(f"{operated.server.url}/health", headers={"X-Request-Id": "probe"})
    operated.chat("sk-team", **{"X-Request-Id": "after"})
    wait_until(lambda: bool(operated.lines(request_id="after")), "a later line")
    assert not operated.lines(request_id="probe")


def test_a_span_for_the_request_and_one_for_each_phase(operated: Operated) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    body = chat_body(max_tokens=12, ignore_eos=True, temperature=0.5)
    assert operated.chat("sk-team", body, traceparent=parent).status_code == 200
    trace = bytes.fromhex(TRACE)
    wait_until(lambda: sum(span.trace_id == trace for span in operated.receiver.spans) == 4, "the spans")
    spans = {span.name.split()[0]: span for span in operated.receiver.spans if span.trace_id == trace}
    assert set(spans) == {"chat", "queue", "prefill", "decode"}
    root = spans["chat"]
    found = attributes(root)
    assert root.name == f"chat {found['gen_ai.request.model']}"
    assert root.parent_span_id == bytes.fromhex(PARENT)
    assert root.kind == root.SPAN_KIND_SERVER
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
    }
    assert expected.items() <= found.items()
    assert found["gen_ai.usage.input_tokens"] > 0
    assert 0 < found["gen_ai.server.time_to_first_token"] < 30
    end = root.start_time_unix_nano
    for phase in ("queue", "prefill", "decode"):
        span = spans[phase]
        assert span.parent_span_id == root.span_id
        assert end <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
        end = span.end_time_unix_nano
    assert {line["trace_id"] for line in operated.lines(trace_id=TRACE)} == {TRACE}


def test_what_opentelemetrys_environment_says_is_kept_to(operated: Operated) -> None:
    operated.chat("sk-team")
    wait_until(lambda: bool(operated.receiver.spans), "spans")
    resource = operated.receiver.resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("oscine", "test")
    assert operated.receiver.headers[-1]["x-tenant"] == "blue"


def test_a_failed_request_is_a_failed_span(operated: Operated) -> None:
    trace = "5" * 32
    operated.chat("wrong", traceparent=f"00-{trace}-{PARENT}-01")
    wait_until(lambda: any(s.trace_id == bytes.fromhex(trace) for s in operated.receiver.spans), "the span")
    (span,) = (s for s in operated.receiver.spans if s.trace_id == bytes.fromhex(trace))
    assert span.name == "POST /v1/chat/completions"
    assert attributes(span)["error.type"] == "invalid_api_key"
    assert "gen_ai.operation.name" not in attributes(span)


def test_browsers_of_the_allowed_origin_may_call(operated: Operated) -> None:
    url = f"{operated.server.url}/v1/chat/completions"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    preflight = httpx.options(url, headers={"Origin": ORIGIN, **asks})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = operated.chat("none", Origin=ORIGIN)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert "Retry-After" in refused.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in operated.chat("sk-team", Origin="https://evil.example").headers


def test_usage_by_key(operated: Operated) -> None:
    text = operated.server.get("/metrics")
    for name in ("team", "slow", "small", "api-key-1"):
        assert f'oscine:api_key_requests_total{{api_key="{name}",status="200"}}' in text
        assert f'oscine:api_key_tokens_total{{api_key="{name}",type="generation"}}' in text
    assert 'oscine:request_errors_total{code="rate_limit_exceeded",path="/v1/chat/completions"}' in text
    assert "sk-" not in text
