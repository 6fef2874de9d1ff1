"""What a client may ask of the server: a body of bounded size sent in bounded time, and a place in the queue.

Knows bodies and numbers; not what a body says, nor who sent it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from oscine.api.http.errors import APIError, unavailable
from oscine.api.http.work import Trimmer

BODY_TIMEOUT_S = 60.0
MAX_BODIES_BYTES = 512 << 20  # of all requests together: their bytes and their decoded objects
MAX_VALUES = 1 << 18  # values and keys per JSON text
_VALUE_BYTES = 96  # approximate size of one decoded value
_BEFORE_VALUES = b",:[{"  # one of these precedes each value and key, except the first
_DEPARTURES = 64  # that an estimate looks back on
_LONGEST_WAIT_S = 60.0  # that a client is told


async def read_body(request: Request, limit: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body, sent with a length or in chunks. Raises APIError 413 above `limit` bytes, 408 when it is late.

    Raises starlette's ClientDisconnect when the client goes away meanwhile.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        headers = {"Connection": "close"}
        raise APIError(f"The body did not arrive within {timeout_s:g} s.", status=408, headers=headers) from None
    return b"".join(chunks)


def _too_large(limit: int) -> APIError:
    return APIError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large")


def check_values(text: bytes) -> None:
    """Raises ValueError for JSON with more than MAX_VALUES values and keys. Checked before decoding.

    Decoding is one call that nothing can interrupt. This bounds its time and its memory.
    """
    if _marks(text) <= MAX_VALUES:
        return
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark begins or ends a string
    strings = plain.count(b'"') // 2
    if strings > MAX_VALUES or _marks(b"".join(plain.split(b'"')[::2])) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} JSON values")


def _marks(text: bytes) -> int:
    return len(text) - len(text.translate(None, _BEFORE_VALUES))  # one pass, where `count` would take four


def values_of(piece: bytes, earlier: int) -> int:
    """Upper bound of the values in a piece of a body, after `earlier` ones. No body is decoded to more."""
    return min(_marks(piece), MAX_VALUES - earlier)


def memory_of(piece: bytes, values: int) -> int:
    """Bytes that a piece of a body takes until its request is over: as received and as objects."""
    return len(piece) + _VALUE_BYTES * values


class Bodies:
    """Counts the memory of the bodies of all unfinished requests; each body is held until its request is over."""

    def __init__(self) -> None:
        self._bytes = 0
        self._trimmer = Trimmer()

    def take(self, size: int) -> None:
        """Raises APIError 503 when there is no room; what was taken before stays taken."""
        if self._bytes + size > MAX_BODIES_BYTES:
            raise unavailable("The server holds as many large requests as it can.", code="overloaded")
        self._bytes += size

    def give_back(self, size: int) -> None:
        self._bytes -= size
        self._trimmer.freed(size)


class Departures:
    """How soon there is room, by how quickly there lately was."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lately: deque[tuple[float, int, int]] = deque(maxlen=_DEPARTURES)

    def add(self, sequences: int, tokens: int) -> None:
        self._lately.append((self._clock(), sequences, tokens))

    def clear(self) -> None:
        """What comes after an idle time says more than what came before."""
        self._lately.clear()

    def wait_s(self, sequences: int, tokens: int) -> float | None:
        """Until so many sequences with so many tokens will have left; None while too few have."""
        if len(self._lately) < 2:
            return None
        (begin_s, *_), *left = self._lately
        elapsed_s = self._clock() - begin_s
        of_sequences = sequences / sum(entry[1] for entry in left)
        of_tokens = tokens / max(sum(entry[2] for entry in left), 1)
        return min(max(of_sequences, of_tokens) * elapsed_s, _LONGEST_WAIT_S)


class Admission:
    """Counts sequences, and the tokens of their prompts, between their admission and their end.

    Tokens are what a queue costs: 128 sequences of a long prompt are more than the engine wants to hold.
    """

    def __init__(self, max_sequences: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.departures = Departures(clock)
        self.sequences = self.tokens = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def check(self, sequences: int, tokens: int = 0) -> None:
        """Raises APIError: 503 when there is no room now, 400 for a request that could never fit."""
        if sequences > self.max_sequences:
            message = f"The request asks for {sequences} sequences; this server takes {self.max_sequences} at once."
            raise APIError(message)
        if tokens > self.max_tokens:
            message = f"The request has {tokens} prompt tokens in its {sequences} sequences"
            raise APIError(f"{message}; this server takes {self.max_tokens} at once.")
        too_many, too_long = self.sequences + sequences - self.max_sequences, self.tokens + tokens - self.max_tokens
        if too_many > 0 or too_long > 0:
            wait_s = self.departures.wait_s(max(too_many, 0), max(too_long, 0))
            message = "The server has as many requests as it can queue."
            raise unavailable(message, code="overloaded", retry_after_s=wait_s)

    @contextmanager
    def hold(self, sequences: int, tokens: int = 0) -> Iterator[None]:
        """`tokens` are those of all prompts. Raises APIError as check does."""
        self.check(sequences, tokens)
        self.sequences += sequences
        self.tokens += tokens
        self._empty.clear()
        try:
            yield
        finally:
            self.sequences -= sequences
            self.tokens -= tokens
            self.departures.add(sequences, tokens)
            if not self.sequences:
                self.departures.clear()
                self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()
