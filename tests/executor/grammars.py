"""A vocabulary for the tiny model, a grammar over it, and the allowed tokens computed in plain Python.

Words over a, b and c as tokens; the grammar is a number of WORDS, one after the other, then the stop token.
"""

import json
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.tiny import TINY

END, STOP = TINY.vocab_size - 2, TINY.vocab_size - 1
TOKENS = ["".join(letters) for length in range(1, 5) for letters in product("abc", repeat=length)][:END]
WORDS = ("abc", "b", "ca")


def grammar(fewest: int, most: int) -> str:
    """Without it, llguidance allows one spelling alone, the tokenizer's, of what the grammar leaves no choice in."""
    any_spelling = '%llguidance {"no_forcing": true}'
    return f"{any_spelling}\nstart: /({'|'.join(WORDS)}){{{fewest},{most}}}/ <|return|>"


def forced_grammar(between: str, most: int) -> str:
    """Words around a forced text, which has one spelling here."""
    return f'start: /{"|".join(WORDS)}/ "{between}" /({"|".join(WORDS)}){{1,{most}}}/ "cabab" <|return|>'


def tokenizer_file(folder: Path, specials: Mapping[str, int] = MappingProxyType({})) -> Path:
    """`specials` stand in the place of the last words. Skips a test where no grammar can be compiled."""
    pytest.importorskip("llguidance", reason="it compiles grammars")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = sorted([(END, "<|endoftext|>"), (STOP, "<|return|>"), *((i, name) for name, i in specials.items())])
    vocabulary = {token: i for i, token in enumerate(TOKENS) if i not in specials.values()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in added],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


@cache
def _states(text: str) -> frozenset[tuple[int, str]]:
    """Every way to read a text: complete words, and what is begun of the next one."""
    if not text:
        return frozenset({(0, "")})
    longer = [(count, begun + text[-1]) for count, begun in _states(text[:-1])]
    inside = {(count, begun) for count, begun in longer if any(w.startswith(begun) for w in WORDS if w != begun)}
    return frozenset(inside | {(count + 1, "") for count, begun in longer if begun in WORDS})


def allowed(text: str, fewest: int, most: int) -> set[int]:
    """Tokens that may follow a text; none if it is no beginning of anything."""

    def possible(longer: str) -> bool:
        return any(count + bool(begun) <= most for count, begun in _states(longer))

    found = {i for i, token in enumerate(TOKENS) if possible(text + token)}
    complete = any(not begun and fewest <= count <= most for count, begun in _states(text))
    return found | {STOP} if complete else found


def text_of(token_ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in token_ids if i != STOP)
