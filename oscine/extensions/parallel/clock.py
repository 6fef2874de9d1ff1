"""The step clock of engines that compute experts together: which step comes next, and how large it is on each rank.

Before each step every rank writes one word: the number of the step, its tokens, and whether a CUDA graph can run it.
Once all words of a step are there, every rank knows the same. A rank without work writes its word when another one has.
"""

import os
from contextlib import suppress
from math import inf

from oscine.executor.lockstep import Agreed
from oscine.extensions.parallel.rendezvous import is_lost, wait, words_of
from oscine.types import RankHandle

_TOKEN_BITS = 24


class StepClock:
    """One rank's. Two words per rank are used in turns: a rank is never two steps ahead of one that still reads."""

    def __init__(self, handle: RankHandle, limit_s: float) -> None:
        """`limit_s`: until a rank that does not come to a step ends the group, once all ranks serve."""
        self.rank, self.num_ranks = handle.rank, handle.num_ranks
        self._words, self._wakes = words_of(handle), handle.wakes
        self._serving_limit_s, self._limit_s = limit_s, inf
        self._step = 0  # that this rank came to last

    def fileno(self) -> int:
        """Can be read once another rank has come to a step; see `rest`."""
        return self._wakes[self.rank]

    def rest(self) -> None:
        """Forgets what woke this rank. Call it before `is_awaited`, and sleep if that is false."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakes[self.rank])

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has come to a step that this one has not, or the group has ended."""
        return is_lost(self._words) or any(
            word >> _TOKEN_BITS + 1 > self._step for word in self._of_all(self._step + 1)
        )

    def serve(self) -> None:
        """Returns when all ranks have called it. From then on, one that does not come in time is lost."""
        self.agree(0, False)
        self._limit_s = self._serving_limit_s

    def agree(self, num_tokens: int, replays: bool) -> Agreed:
        """Comes to the next step with a number of tokens. Returns when all have. Raises RankLostError."""
        self._step = step = self._step + 1
        mine = (step << 1 | replays) << _TOKEN_BITS | num_tokens
        self._words[self._first(step) + self.rank] = mine
        for rank, wake in enumerate(self._wakes):
            if rank != self.rank:
                os.eventfd_write(wake, 1)
        wait(self._words, self._absent, self._limit_s)
        words = self._of_all(step)
        tokens = tuple(word & (1 << _TOKEN_BITS) - 1 for word in words)
        return Agreed(tokens, all(word >> _TOKEN_BITS & 1 for word in words))

    def _absent(self) -> int | None:
        step = self._step
        return next((rank for rank, word in enumerate(self._of_all(step)) if word >> _TOKEN_BITS + 1 != step), None)

    def _of_all(self, step: int) -> list[int]:
        first = self._first(step)
        return self._words[first : first + self.num_ranks].tolist()

    def _first(self, step: int) -> int:
        return step % 2 * self.num_ranks
