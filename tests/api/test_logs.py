"""The log's lines, as text and as JSON."""

import json
import logging
import sys

import pytest

from oscine.api.common.record import RequestRecord, current
from oscine.api.telemetry.logs import ErrorQuota, JsonFormatter, TextFormatter, log_request
from tests.api.test_rate_limits import Clock

SCOPE = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"x-request-id", b"abc")]}


def record(message: str, *, failed: bool = False) -> logging.LogRecord:
    try:
        raise KeyError("why")
    except KeyError:
        error = sys.exc_info() if failed else None
    return logging.LogRecord("oscine.x", logging.WARNING, __file__, 1, message, (), error)


def test_a_line_says_which_request_it_is_about() -> None:
    outside = current.set(RequestRecord.of(SCOPE))
    try:
        assert TextFormatter().format(record("slow")).endswith(" WARNING slow request_id=abc")
        line = json.loads(JsonFormatter().format(record("slow\nindeed", failed=True)))
    finally:
        current.reset(outside)
    assert (line["request_id"], line["level"], line["logger"]) == ("abc", "warning", "oscine.x")
    assert line["message"] == "slow\nindeed"
    assert "KeyError: 'why'" in line["exception"]


def test_the_line_of_a_request_as_text(caplog: pytest.LogCaptureFixture) -> None:
    request = RequestRecord.of(SCOPE)
    request.status, request.ended_s = 200, request.started_s + 1.5
    with caplog.at_level(logging.INFO, "oscine.requests"):
        log_request(request)
    (line,) = caplog.records
    assert TextFormatter().format(line).endswith(" INFO POST /x 200 request_id=abc duration_s=1.5")


def test_what_a_client_calls_the_model_makes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    request = RequestRecord.of(SCOPE)
    request.status, request.ended_s = 404, request.started_s + 1.5
    request.model = "a\n12:00:00 INFO POST /y 200 key=b" + "x" * 10_000
    with caplog.at_level(logging.INFO, "oscine.requests"):
        log_request(request)
    (line,) = caplog.records
    text = TextFormatter().format(line)
    assert ' model="a\\n12:00:00 INFO POST /y 200 key=bxxx' in text
    assert text.count("\n") == 0
    assert len(text) < 400
    assert json.loads(JsonFormatter().format(line))["model"].startswith("a\n12")


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("GET", 503), ("GET", 404), ("POST", 200), ("POST", 503)])
def test_probes_are_lines_of_level_debug(method: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    request = RequestRecord.of(SCOPE | {"method": method})
    request.status, request.ended_s = status, request.started_s
    with caplog.at_level(logging.DEBUG, "oscine.requests"):
        log_request(request)
    (line,) = caplog.records
    assert (line.levelno == logging.DEBUG) == (method == "GET" and status in (200, 503))


def line_of(status: int) -> logging.LogRecord:
    line = record("POST /x")
    line.oscine_fields = {"status": status}
    return line


def test_a_flood_of_errors_fills_no_disk() -> None:
    clock = Clock()
    quota = ErrorQuota(clock)
    passed = [quota.filter(line_of(401)) for _ in range(5000)]
    assert 0 < sum(passed) <= 1000
    assert all(quota.filter(line_of(200)) for _ in range(5000))
    assert quota.filter(record("a line about no request"))
    clock.now += 61
    first, second = line_of(404), line_of(404)
    assert quota.filter(first)
    assert quota.filter(second)
    assert first.oscine_fields["not_logged"] == 5000 - sum(passed)  # type: ignore[attr-defined]
    assert "not_logged" not in second.oscine_fields  # type: ignore[attr-defined]


def test_the_line_of_a_request_has_the_clients_address() -> None:
    forged = SCOPE | {"client": ("192.0.2.7", 1234), "headers": [(b"x-forwarded-for", b"203.0.113.1")]}
    assert RequestRecord.of(forged).client == "192.0.2.7"


def test_what_was_refused_before_it_was_a_request_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "oscine.requests"):
        log_request(RequestRecord.refused("192.0.2.7", 431, "head_too_large"))
    (line,) = caplog.records
    assert TextFormatter().format(line).endswith(" INFO - - 431 client=192.0.2.7 error=head_too_large duration_s=0.0")


def test_a_line_about_no_request() -> None:
    assert TextFormatter().format(record("up")).endswith(" WARNING up")
    assert "request_id" not in json.loads(JsonFormatter().format(record("up")))
