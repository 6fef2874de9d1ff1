"""What crosses the socket between an engine process and its clients, as MessagePack; and the JSON that starts it.

The records of oscine.types travel as they are. Only plain data is decoded: nothing that arrives can name code.
"""

from msgspec import MsgspecError, Struct, msgpack

from oscine.engine.wire.endpoint import KVEndpoint
from oscine.settings.config import EngineOptions
from oscine.types import AdapterInfo, EngineInfo, EngineStats, GenerationOutput, GenerationRequest, RankHandle


class Launch(Struct, frozen=True):
    """First line, in JSON, on the engine process's stdin: see oscine.engine.process.parent for what comes after it."""

    address: str  # ZeroMQ endpoint that the engine binds
    options: EngineOptions
    handle: RankHandle | None = None  # among engines that share experts


class Hello(Struct, frozen=True, tag="hello"):
    """First message of a client; answered by Ready, once the engine is, or by Failed."""


class Submit(Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: str


class Sleep(Struct, frozen=True, tag="sleep"):
    """Wants the engine to free its memory, or to wake up. It does so once it has no request; answered by Slept."""

    asleep: bool


class LoadAdapter(Struct, frozen=True, tag="load_adapter"):
    """A low-rank adapter for requests from now on; answered by AdapterNews."""

    name: str
    path: str  # folder
    number: int = 0  # of its sender's loads


class UnloadAdapter(Struct, frozen=True, tag="unload_adapter"):
    """No request will have it. Its memory is free when the last one that has it has ended. There is no answer."""

    identity: str
    unheard: tuple[int, ...] = ()  # loads of its sender without news. An adapter that one of these has named stays.


class AdapterNews(Struct, frozen=True, tag="adapter_news"):
    """What became of LoadAdapter."""

    name: str
    info: AdapterInfo | None  # None: it failed
    error: str = ""  # one line
    number: int = 0  # of the load


class Meet(Struct, frozen=True, tag="meet"):
    """First message of another engine, which wants pages of this one; answered by Met."""


class Prefill(Struct, frozen=True, tag="prefill"):
    """Another engine wants these tokens computed, and their pages kept; answered by Prefilled or PrefillRefused."""

    request_id: str  # unique among those of its sender
    token_ids: list[int]  # whole pages
    lease_s: float  # how long the pages are kept after the answer unless they are released
    priority: int
    cache_salt: str = ""
    adapter: str = ""


class Release(Struct, frozen=True, tag="release"):
    """The pages, or the computation, are not wanted any more."""

    request_id: str


class Ready(Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Failed(Struct, frozen=True, tag="failed"):
    """The engine could not start; it exits after this message."""

    message: str  # one line


class Ending(Struct, frozen=True, tag="ending"):
    """The engine is about to end: none of its requests goes on here, though none of them may be bad."""

    message: str  # one line
    asked: bool = False  # its owner wants it; else it failed


class Refused(Struct, frozen=True, tag="refused"):
    """Too many requests wait; this one was not taken."""

    request_id: str
    message: str


class Slept(Struct, frozen=True, tag="slept"):
    """What has become of the newest Sleep."""

    asleep: bool  # whether the engine sleeps now
    error: str | None = None  # why that is not what was asked for; one line


class Outputs(Struct, frozen=True, tag="outputs"):
    """The news of one step for one client: all its sequences in one message."""

    outputs: list[GenerationOutput]
    stats: EngineStats | None  # now and then; always when the engine becomes idle


class Met(Struct, frozen=True, tag="met"):
    endpoint: KVEndpoint | None  # None: this engine's pages cannot be read


class Prefilled(Struct, frozen=True, tag="prefilled"):
    """The pages hold their content from now on for the time of the lease."""

    request_id: str
    pages: list[list[int]]  # per group: of all the tokens, or of the last window
    lease_s: float


class PrefillRefused(Struct, frozen=True, tag="prefill_refused"):
    request_id: str
    message: str  # one line


FromPeer = Meet | Prefill | Release
ToPeer = Met | Prefilled | PrefillRefused
Command = LoadAdapter | UnloadAdapter  # for extensions of the engine
ToEngine = Hello | Submit | Cancel | Sleep | Command | FromPeer
ToClient = Ready | Failed | Ending | Refused | Outputs | Slept | AdapterNews | ToPeer

UNREADABLE = (MsgspecError, UnicodeDecodeError)  # raised by decoding; the second for text that is not UTF-8

encode = msgpack.Encoder().encode
decode_to_engine = msgpack.Decoder(ToEngine).decode
decode_to_client = msgpack.Decoder(ToClient).decode
