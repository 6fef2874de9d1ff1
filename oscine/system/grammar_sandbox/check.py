"""Checks of grammars: whether llguidance can compile and follow them within its limits.

The limits bound the states of a lexer and the size of a grammar. They bound neither the time to compile nor the time
per mask. So a check runs in a process that can be killed: see pool.py.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_WALKED = 32  # bytes at the beginning of a text
_PRINTABLE = sum(1 << byte for byte in range(0x21, 0x7F))


class GrammarCheck(NamedTuple):
    grammar: str
    walk: bool = False  # without special tokens: also follows the grammar through its first bytes


class Problem(NamedTuple):
    check: int  # its index
    message: str  # one line or a few, for the author of the grammar


@cache
def limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, step_max_items=25_000)


def first_problem(checks: Sequence[GrammarCheck]) -> Problem | None:
    """The first problem of the checks, or None. A hostile grammar takes minutes."""
    for index, check in enumerate(checks):
        message = _early_problem(check.grammar) if check.walk else _problem(check.grammar)
        if message:
            return Problem(index, message)
    return None


def _problem(grammar: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(grammar, limits=limits())


def _early_problem(grammar: str) -> str:
    """The first problem on the way through the first bytes: a grammar may compile, but have too many states.

    Each step takes the lowest printable byte that is allowed. In JSON that is a quotation mark where possible.
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
