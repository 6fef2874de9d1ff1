"""The log on stderr: text, or one JSON object per line.

Each line has the id of its request. The text of prompts and answers is never logged.
"""

import datetime
import json
import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from oscine.api.common.record import RequestRecord, current

_requests = logging.getLogger("oscine.requests")
_IN_MESSAGE = ("method", "path", "status")  # fields that the text of a request's line has
_LONGEST = 200  # characters of a value that the client chose
_MAX_ERRORS = 1000  # lines per minute about requests that were answered with an error
_FIELDS = "oscine_fields"  # the attribute of a log record with further fields


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        context = _context(record).items()
        fields = " ".join(f"{name}={_word(value)}" for name, value in context if name not in _IN_MESSAGE)
        return f"{super().formatMessage(record)} {fields}".rstrip()


def _word(value: object) -> str:
    """Quotes a client's value that has spaces, line breaks or quotes, so that it stays on one line."""
    text = str(value)
    return text if text.isprintable() and not {*' "'}.intersection(text) else json.dumps(text)


def _context(record: logging.LogRecord) -> dict[str, Any]:
    request = current.get()
    given: dict[str, Any] | None = getattr(record, _FIELDS, None)
    if given is not None or request is None:
        return given or {}
    return {"request_id": request.request_id.decode()}


class ErrorQuota(logging.Filter):
    """Passes at most _MAX_ERRORS lines per minute about requests with an error, so that a flood does not fill the
    disk.

    The next line that passes has the number of dropped lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begin_s = -math.inf  # of the minute
        self._passed = self._held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, _FIELDS, {})
        if fields.get("status", 0) < 400:
            return True
        now_s = self._clock()
        if now_s - self._begin_s >= 60:
            self._begin_s, self._passed = now_s, 0
        self._passed += 1
        if self._passed > _MAX_ERRORS:
            self._held_back += 1
            return False
        if self._held_back:
            fields["not_logged"], self._held_back = self._held_back, 0
        return True


def start_logging(level: str, kind: str) -> None:
    """`kind` is text or json. Replaces all earlier handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    handler.addFilter(ErrorQuota())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its start and malformed HTTP are not worth a line
        for client in ("httpx", "httpx2"):  # one of them is used by huggingface_hub
            logging.getLogger(client).setLevel(logging.WARNING)


def log_request(record: RequestRecord) -> None:
    """One line when a request is over. A GET that succeeds, or a probe of a server that is not ready, is for debug."""
    is_usual = record.method != "POST" and (record.status < 400 or record.status == HTTPStatus.SERVICE_UNAVAILABLE)
    level = logging.DEBUG if is_usual else logging.INFO
    if _requests.isEnabledFor(level):
        message = f"{record.method} {record.path[:_LONGEST]} {record.status}"
        _requests.log(level, "%s", message, extra={_FIELDS: _fields(record)})


def _fields(record: RequestRecord) -> dict[str, Any]:
    sequences = record.sequences
    fields = {
        "request_id": record.request_id.decode() or None,
        "client": record.client,
        "trace_id": record.trace_id,
        "key": record.key.name if record.key else None,
        "method": record.method,
        "path": record.path[:_LONGEST],
        "status": record.status,
        "error": record.error,
        "model": record.model and record.model[:_LONGEST],
        "tools_left_out": ",".join(record.tools_left_out) or None,
        "duration_s": round(record.ended_s - record.started_s, 6),
    }
    if sequences:
        first = record.first_token_s
        waits = [s.scheduled_s - s.arrived_s for s in sequences if s.scheduled_s]
        fields |= {
            "queue_s": round(min(waits), 6) if waits else None,
            "first_token_s": None if first is None else round(first, 6),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": sum(s.cached_tokens for s in sequences),
            "completion_tokens": record.tokens,
            "finish_reason": ",".join(dict.fromkeys(s.finish_reason for s in sequences)),
        }
    return {name: value for name, value in fields.items() if value is not None}
