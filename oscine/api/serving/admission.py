"""Bounds the sequences of a model, from their admission to their end, and estimates the wait of refused ones."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oscine.api.common.errors import APIError, unavailable

_DEPARTURES = 64  # used for an estimate
_LONGEST_WAIT_S = 60.0  # told to a client at most


class Departures:
    """Estimates the time until there is room from the recent rate of departures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lately: deque[tuple[float, int, int]] = deque(maxlen=_DEPARTURES)

    def add(self, sequences: int, tokens: int) -> None:
        self._lately.append((self._clock(), sequences, tokens))

    def clear(self) -> None:
        """Forgets the departures before an idle time."""
        self._lately.clear()

    def wait_s(self, sequences: int, tokens: int) -> float | None:
        """Seconds until this many sequences and tokens will have left; None while too few have."""
        if len(self._lately) < 2:
            return None
        (begin_s, *_), *left = self._lately
        elapsed_s = self._clock() - begin_s
        of_sequences = sequences / sum(entry[1] for entry in left)
        of_tokens = tokens / max(sum(entry[2] for entry in left), 1)
        return min(max(of_sequences, of_tokens) * elapsed_s, _LONGEST_WAIT_S)


class Admission:
    """Counts sequences, and the tokens of their prompts, between their admission and their end.

    The tokens of a queue cost memory: 128 sequences of a long prompt are more than the engine should hold.
    """

    def __init__(self, max_sequences: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.departures = Departures(clock)
        self.sequences = self.tokens = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._left = asyncio.Event()  # set at each departure
        self._line = asyncio.Lock()  # held by the first of those that wait for room

    def check(self, sequences: int, tokens: int = 0) -> None:
        """Raises APIError: 503 if there is no room now, 400 for a request that could never fit."""
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

    async def until_room(self, sequences: int, tokens: int = 0) -> None:
        """Waits in line until there is room. Raises APIError 400 for a request that could never fit."""
        async with self._line:
            while True:
                self._left.clear()
                try:
                    return self.check(sequences, tokens)
                except APIError as error:
                    if error.code != "overloaded":
                        raise
                await self._left.wait()

    @contextmanager
    def hold(self, sequences: int, tokens: int = 0) -> Iterator[None]:
        """`tokens`: of all prompts. Raises APIError as check does."""
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
            self._left.set()
            if not self.sequences:
                self.departures.clear()
                self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()
