"""Whether llguidance can use a grammar: its limits, and a trial of what they do not bound.

The limits bound the states of a lexer and the size of a grammar. They bound neither the time of a compilation nor that
of a mask, so a trial runs in a process that can be killed: see grammar_judges.py.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_WALKED = 32  # bytes at the begin of a text
_PRINTABLE = sum(1 << byte for byte in range(0x21, 0x7F))


class Trial(NamedTuple):
    grammar: str
    walk: bool = False  # without special tokens: also follows the grammar through its first bytes


class Problem(NamedTuple):
    trial: int  # its index
    message: str  # in a line or a few, for the author of the grammar


@cache
def limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, step_max_items=25_000)


def first_problem(trials: Sequence[Trial]) -> Problem | None:
    """May take minutes, for a grammar that was written to."""
    for index, trial in enumerate(trials):
        message = _early_problem(trial.grammar) if trial.walk else _problem(trial.grammar)
        if message:
            return Problem(index, message)
    return None


def _problem(grammar: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(grammar, limits=limits())


def _early_problem(grammar: str) -> str:
    """What a walk through the first bytes runs into: what compiles may still leave too much open to be followed.

    It takes the lowest byte that prints; in JSON that is a quotation mark wherever one may come, so it gets on.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    for _ in range(_WALKED):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & _PRINTABLE
        if matcher.is_error() or not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return matcher.get_error()


@cache
def _bytes() -> "LLTokenizer":
    """A vocabulary of bytes, each its own token."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
