"""What crosses the socket between an engine process and its clients, as MessagePack; and the JSON that starts it.

The records of oscine.types travel as they are. Only plain data is decoded: nothing that arrives can name code.
"""

from msgspec import Struct, msgpack

from oscine.config import EngineOptions
from oscine.types import EngineInfo, EngineStats, GenerationOutput, GenerationRequest


class Launch(Struct, frozen=True):
    """One line of JSON on the engine process's stdin, which stays open as long as the parent wants the engine."""

    address: str  # ZeroMQ endpoint that the engine binds
    options: EngineOptions


class Hello(Struct, frozen=True, tag="hello"):
    """First message of a client; answered by Ready, once the engine is, or by Failed."""


class Submit(Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: str


class Ready(Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Failed(Struct, frozen=True, tag="failed"):
    """The engine could not start; it exits after this message."""

    message: str  # one line


class Ending(Struct, frozen=True, tag="ending"):
    """The engine failed and is about to end: none of its requests goes on here, though none of them may be bad."""

    message: str  # one line


class Refused(Struct, frozen=True, tag="refused"):
    """Too many requests wait; this one was not taken."""

    request_id: str
    message: str


class Outputs(Struct, frozen=True, tag="outputs"):
    """The news of one step for one client: all its sequences in one message."""

    outputs: list[GenerationOutput]
    stats: EngineStats | None  # now and then; always when the engine becomes idle


ToEngine = Hello | Submit | Cancel
ToClient = Ready | Failed | Ending | Refused | Outputs

encode = msgpack.Encoder().encode
decode_to_engine = msgpack.Decoder(ToEngine).decode
decode_to_client = msgpack.Decoder(ToClient).decode
