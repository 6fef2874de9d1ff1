"""The rules of a step, made once by rank 0 and sent to the other ranks."""

from collections.abc import Callable, Sequence

import torch

from oscine.executor.batch.slots import IntArray, Rows
from oscine.executor.sampling.headers import CandidateSet
from oscine.executor.sampling.rules import Masks, Rules
from oscine.extensions.parallel.messages import decode_forced, decode_rules, encode_forced, encode_rules
from oscine.extensions.parallel.ring import RingReader, RingWriter
from oscine.types import NewSequence, SamplingParams


class _OfRanks:
    """What every rank knows by itself: which slots have a grammar."""

    def __init__(self) -> None:
        self._with_grammar: set[int] = set()

    def assign(self, new: NewSequence) -> None:
        if new.sampling.grammar is None:
            self._with_grammar.discard(new.slot)
        else:
            self._with_grammar.add(new.slot)

    def may_force(self, slots: Sequence[int]) -> bool:
        """Whether the ranks exchange forced tokens of these slots."""
        return not self._with_grammar.isdisjoint(slots)


class SentRules(_OfRanks):
    """The rules of rank 0. Sends each answer to the other ranks."""

    def __init__(self, rules: Rules, ring: RingWriter) -> None:
        super().__init__()
        self._rules, self._ring = rules, ring
        self.ready, self.sampled, self.errors = rules.ready, rules.sampled, rules.errors

    def assign(self, new: NewSequence) -> None:
        super().assign(new)
        self._rules.assign(new)

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | CandidateSet | None:
        allowed = self._rules.allowed(rows, is_plain)
        self._ring.send(*encode_rules(allowed))
        return allowed

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        forced = self._rules.forced(slots, most)
        if self.may_force(slots):
            self._ring.send(encode_forced(forced))
        return forced


class ReceivedRules(_OfRanks):
    """The rules of another rank: the answers of rank 0, which also reports the errors of grammars."""

    def __init__(self, ring: RingReader, device: torch.device) -> None:
        super().__init__()
        self._ring, self._device = ring, device

    def ready(self, sampling: SamplingParams) -> bool:
        return True

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | CandidateSet | None:
        return decode_rules(self._ring.receive(), self._device)

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return decode_forced(self._ring.receive()) if self.may_force(slots) else [[] for _ in slots]

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        pass

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        return {}
