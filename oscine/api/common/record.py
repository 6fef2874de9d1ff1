"""What is learned of one HTTP request while it is served, for its log line, its metrics and its trace.

It never holds text of a prompt or an answer. `current` is the record of the request that the running task serves, also
in the tasks that it starts. It is read for logging only.
"""

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from oscine.api.common.asgi import Scope
from oscine.api.common.rate_limits import KeyUse
from oscine.engine.wire.stream import Attempt
from oscine.types import SamplingParams

_USABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_UNUSABLE = re.compile(r"[^a-zA-Z0-9_.:-]")
_LONGEST_WORD = 64  # characters
CLIENT_LEFT = 499  # nginx's status for a client that disconnected before there was a response


@dataclass(slots=True)
class SequenceTimes:
    """One sequence from its arrival to its end. Times are in seconds on the clock of time.perf_counter; 0: never."""

    arrived_s: float
    scheduled_s: float = 0.0  # in a step for the first time
    first_s: float = 0.0  # first token
    last_s: float = 0.0  # newest token
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)  # of a cluster: one per replica


@dataclass(slots=True)
class RequestRecord:
    request_id: bytes  # the client's own, if it sent a usable one
    method: str
    path: str  # percent-encoded, as it came
    started_s: float  # on the clock of time.perf_counter
    started_ns: int  # since 1970
    client: str | None = None  # address; behind a trusted proxy, the address that uvicorn reads from its header
    route: str = ""  # the path of the endpoint, parameters by name
    status: int = 0  # 0: no response yet
    error: str | None = None  # code of the error that was answered, or that ended a stream
    key: KeyUse | None = None
    model: str | None = None  # by the client's name for it
    sampling: SamplingParams | None = None  # of the first sequence
    trace_id: str | None = None  # 32 hexadecimal digits
    tools_left_out: tuple[str, ...] = ()  # types of tools that the request names and the server lacks
    sequences: list[SequenceTimes] = field(default_factory=list)
    ended_s: float = 0.0

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        given = header(scope, b"x-request-id")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        raw_path = scope.get("raw_path") or scope["path"].encode()
        path = raw_path.decode("ascii", "backslashreplace")
        client = scope.get("client")
        return cls(
            request_id, scope["method"], path, time.perf_counter(), time.time_ns(), client[0] if client else None
        )

    @classmethod
    def refused(cls, client: str | None, status: int, error: str) -> "RequestRecord":
        """The record of a connection that was answered with an error before its request was read."""
        now_s = time.perf_counter()
        return cls(b"", "-", "-", now_s, time.time_ns(), client, status=status, error=error, ended_s=now_s)

    @property
    def prompt_tokens(self) -> int:
        """Over all sequences: the prompt of several choices counts once per choice."""
        return sum(sequence.prompt_tokens for sequence in self.sequences)

    @property
    def tokens(self) -> int:
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def first_token_s(self) -> float | None:
        """From the request to the first token of any sequence."""
        first = min((s.first_s for s in self.sequences if s.first_s), default=None)
        return None if first is None else first - self.started_s


def plain_word(text: str) -> str:
    """A client's word for a header or a line of the log."""
    return _UNUSABLE.sub("?", text[:_LONGEST_WORD])


current: ContextVar[RequestRecord | None] = ContextVar("oscine_request", default=None)


def header(scope: Scope, wanted: bytes) -> bytes:
    """The first value of a header, by its name in lower case; empty when it was not sent."""
    return next((value for name, value in scope["headers"] if name == wanted), b"")
