"""The frames of a connection: what clients send, and what they get."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from oscine.api.common.errors import APIError, invalid
from oscine.api.common.ids import Id

Json = dict[str, Any]
_PASSED_ON = ("retry-after", "x-request-id", "x-tools-left-out")  # headers that errors repeat, beside rate limits
_PREVIOUS = "previous_response_not_found"


class Head(Struct):
    """The fields of a client's event that say where it goes."""

    type: str = ""
    stream_id: str | None = None
    previous_response_id: Id | None = None
    generate: bool | None = None
    background: bool | None = None
    stream: bool | None = None


class SteerMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user"]
    content: str | list[Json]
    type: Literal["message"] = "message"


class Steer(Struct, forbid_unknown_fields=True):
    type: Literal["response.steer"]
    previous_response_id: Id
    input: str | list[SteerMessage]

    @property
    def items(self) -> list[Json]:
        """Raises APIError for an empty input."""
        if not self.input:
            raise invalid("input", "it is empty")
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [msgspec.to_builtins(message) for message in self.input]


def changed(frame: str, before: list[Json] | None = None, **fields: Any) -> str:
    """The event of a client with other fields, and with items before its input; all else stays as it is.

    Raises APIError for items before an input that is neither a text nor a list.
    """
    event = msgspec.json.decode(frame, type=dict[str, Raw])
    event |= {name: Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    if before:
        try:
            given = msgspec.json.decode(event.get("input", Raw(b"[]")), type=str | list[Raw])
        except msgspec.ValidationError:
            raise invalid("input", "it is neither a text nor a list") from None
        said = [Raw(msgspec.json.encode({"role": "user", "content": given}))] if isinstance(given, str) else given
        event["input"] = Raw(msgspec.json.encode([*(Raw(msgspec.json.encode(item)) for item in before), *said]))
    return msgspec.json.encode(event).decode()


def with_lane(data: bytes, stream_id: str | None) -> str:
    """An event with the lane that it belongs to. `data`: a JSON object with a field at least."""
    if stream_id is None:
        return data.decode()
    return f'{data[:-1].decode()},"stream_id":{msgspec.json.encode(stream_id).decode()}}}'


def error_frame(status: int, error: Mapping[str, Any], headers: Mapping[str, str] = {}) -> bytes:
    """`error`: as OpenAI's API has it. `headers`: of the response that would have been sent."""
    status = 400 if error.get("code") == _PREVIOUS else status
    told = {name: text for name, text in headers.items() if name in _PASSED_ON or name.startswith("x-ratelimit-")}
    more = {"headers": told} if told else {}
    return msgspec.json.encode({"type": "error", "status": status, "error": {**error, **more}})


def refusal(error: APIError) -> bytes:
    headers = {name.lower(): text for name, text in error.headers.items()}
    return error_frame(error.status, msgspec.json.decode(error.body())["error"], headers)


def inner_error(data: bytes) -> bytes:
    """An `error` event of a stream in the form that it has in a connection."""
    event = msgspec.json.decode(data)
    error = {"type": "server_error", **{name: event.get(name) for name in ("code", "message", "param")}}
    number = event.get("sequence_number")
    return msgspec.json.encode({"type": "error", "status": 500, "error": error, "sequence_number": number})
