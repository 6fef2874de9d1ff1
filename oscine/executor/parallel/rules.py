"""The rules of a step, made once by rank 0 and sent to the other ranks."""

from collections.abc import Callable, Sequence

import torch

from oscine.executor.headers import Few
from oscine.executor.parallel.messages import decode_forced, decode_rules, encode_forced, encode_rules
from oscine.executor.parallel.ring import RingReader, RingWriter
from oscine.executor.rules import Masks, Rules
from oscine.executor.slots import IntArray, Rows
from oscine.types import NewSequence, SamplingParams


class SentRules:
    """The rules of rank 0. Sends each answer to the other ranks."""

    def __init__(self, rules: Rules, ring: RingWriter) -> None:
        self._rules, self._ring = rules, ring
        self.ready, self.assign = rules.ready, rules.assign
        self.sampled, self.errors = rules.sampled, rules.errors

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | Few | None:
        allowed = self._rules.allowed(rows, is_plain)
        self._ring.send(*encode_rules(allowed))
        return allowed

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        forced = self._rules.forced(slots, most)
        self._ring.send(encode_forced(forced))
        return forced


class ReceivedRules:
    """The rules of another rank: the answers of rank 0, which also reports the errors of grammars."""

    def __init__(self, ring: RingReader, device: torch.device) -> None:
        self._ring, self._device = ring, device

    def ready(self, sampling: SamplingParams) -> bool:
        return True

    def assign(self, new: NewSequence) -> None:
        pass

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | Few | None:
        return decode_rules(self._ring.receive(), self._device)

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return decode_forced(self._ring.receive())

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        pass

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        return {}
