"""Malformed and well-formed completions, in a vocabulary of bytes."""

import json
from collections.abc import Iterable

from hypothesis import strategies as st

from oscine.chat.messages import Message, ToolCall
from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.chat.strategies import texts

INTERVALS = (1, 4, 20)  # tokens that come at once
MARKERS = tuple(SPECIAL_TOKENS.values())
FUNCTIONS = ("add", "0", "a-B_")  # that requests declare

_HEADERS = (
    *("assistant", "analysis", "commentary", "final", "user", "tool", "system", "functions.add", "python", "browser"),
    *(" to=functions.add", " to=", " to=functions.", "to=functions.add", " json", " code", "=", "\n", " "),
)
_SAID = ("Hello", "é日本🐦", '{"a": 1}', '{"a": [', "[]", "null", "\ufffd", "\0", "  \n")
_UNKNOWN = (319, 320, 1 << 30)  # ids that no token has
_bytes = st.binary(min_size=1, max_size=3).filter(lambda data: not set(data) & set(b"<|>"))  # not a marker in letters
_parts = st.one_of(
    st.sampled_from(MARKERS), st.sampled_from(_HEADERS), st.sampled_from(_SAID), st.sampled_from(_UNKNOWN), _bytes
)
Parts = list[str | int | bytes]


def _damaged(parts: Parts, at: int, with_: Parts) -> Parts:
    """Something put in place of one part, or of none: a marker lost, doubled, or out of place."""
    at %= len(parts) + 1
    return [*parts[:at], *with_, *parts[at + (len(with_) != 1) :]]


_THOUGHT: Parts = ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", "assistant"]
_CALL: Parts = [
    "<|channel|>",
    "commentary",
    " to=functions.add",
    " ",
    "<|constrain|>",
    "json",
    "<|message|>",
    '{"a": 1}',
]
_TURNS: tuple[Parts, ...] = (
    [*_THOUGHT, "<|channel|>", "final", "<|message|>", "Hello", "<|return|>"],
    [*_THOUGHT, *_CALL, "<|call|>"],
    [*_CALL, "<|call|>", "<|start|>", "assistant", *_CALL, "<|call|>"],
)
odd_completions: st.SearchStrategy[Parts] = st.one_of(
    st.lists(_parts, max_size=20),
    st.builds(_damaged, st.sampled_from(_TURNS), st.integers(0, 30), st.lists(_parts, max_size=2)),
)

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, _json, max_size=3)


@st.composite
def true_completions(draw: st.DrawFn) -> Message:
    """What a model says with good manners: perhaps a thought, then an answer or calls."""
    calls = draw(st.lists(st.tuples(st.sampled_from(FUNCTIONS), arguments), max_size=2))
    made = tuple(ToolCall(f"call_{i}", name, json.dumps(given)) for i, (name, given) in enumerate(calls))
    return Message("assistant", draw(texts.filter(bool)), draw(st.none() | texts.filter(bool)), made)


def ids_of(tokenizer: Tokenizer, parts: Iterable[str | int | bytes]) -> list[int]:
    """Markers as their ids, bytes as tokens of one byte each; an end, so that there is a token at least."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif part in MARKERS:
            ids.append(_ids(tokenizer)[str(part)])
        else:
            ids += part.encode() if isinstance(part, str) else part
    return [*ids, tokenizer.return_]


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {text: getattr(tokenizer, name) for name, text in SPECIAL_TOKENS.items()}
