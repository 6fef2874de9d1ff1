"""A seeded source of choices that keeps training and held-out material apart.

A tenth of all names, cities, operand pairs and so on is held out, by hash.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
_HELD_OUT_SHARE = 10  # one in this many


@lru_cache(maxsize=1 << 18)
def is_held_out(kind: str, text: str) -> bool:
    """Whether `text` of this kind ("city", "sum", ...) must never be seen in training."""
    return zlib.crc32(f"{kind}:{text}".encode()) % _HELD_OUT_SHARE == 0


@lru_cache(maxsize=1 << 12)
def _side(kind: str, pool: tuple[str, ...], held_out: bool) -> tuple[str, ...]:
    return tuple(text for text in pool if is_held_out(kind, text) == held_out)


class Draw:
    """Random choices on one side of the split. The same seed and side give the same choices."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """Any option, on either side of the split."""
        return options[int(self.rng.random() * len(options))]

    def integer(self, low: int, high: int) -> int:
        """Uniform in low .. high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def pick(self, kind: str, pool: tuple[str, ...]) -> str:
        """An entry of `pool` that lies on this side of the split."""
        return self.choice(_side(kind, pool, self.held_out))

    def make(self, kind: str, maker: Callable[[], T]) -> T:
        """Calls `maker` until its result lies on this side of the split."""
        while True:
            made = maker()
            if is_held_out(kind, str(made)) == self.held_out:
                return made

    def several(self, options: Sequence[T], low: int, high: int) -> list[T]:
        """Between low and high different options, in random order."""
        return self.rng.sample(list(options), min(len(options), self.integer(low, high)))
