"""Grammars over gpt-oss's vocabulary, as llguidance reads it from tiktoken's data and from tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from oscine.executor.sampling import vocabulary
from oscine.executor.sampling.vocabulary import Markers, ranks_of, read_vocabulary
from oscine.model.o200k import NUM_TOKENS, SPECIAL_IDS, o200k_folder
from oscine.model.tokenizer_file import read_text, read_tokenizer

from .grammars import tokenizer_file

if TYPE_CHECKING:
    from llguidance import LLTokenizer

GRAMMARS = (
    'start: "{\\"name\\": \\"" /[a-z]{1,12}/ "\\", \\"count\\": " /[0-9]+/ "}"',
    'start: <|channel|> "final" <|message|> /(?s:.*)/',
    '%llguidance {"no_forcing": true}\nstart: ("Grüße" | "Größe" | "größer 🦀") "\\n"',
)


@pytest.fixture(scope="module")
def o200k() -> Path:
    pytest.importorskip("llguidance", reason="it compiles grammars")
    pytest.importorskip("openai_harmony", reason="it has the vocabulary")
    return o200k_folder() / "tokenizer.json"


@pytest.fixture(scope="module")
def read_whole(o200k: Path) -> "tuple[LLTokenizer, Markers]":
    return read_vocabulary(o200k, NUM_TOKENS)


@pytest.fixture(scope="module")
def read(read_whole: "tuple[LLTokenizer, Markers]") -> "LLTokenizer":
    return read_whole[0]


def walk(tokens: "LLTokenizer", grammar: str) -> list[tuple[list[int], list[int]]]:
    """The allowed and the forced tokens at each place of a text; each time the first allowed token comes next."""
    from llguidance import LLMatcher
    from llguidance.numpy import fill_next_token_bitmask

    matcher, mask_1W = LLMatcher(tokens, grammar, log_level=0), np.zeros((1, -(-NUM_TOKENS // 32)), np.int32)
    places: list[tuple[list[int], list[int]]] = []
    for _ in range(12):
        fill_next_token_bitmask(matcher, mask_1W, 0)
        bits: NDArray[np.uint8] = np.unpackbits(mask_1W.view(np.uint8), bitorder="little")
        places.append((bits.nonzero()[0].tolist(), matcher.compute_ff_tokens()))
        if not places[-1][0]:
            break
        matcher.consume_token(places[-1][0][0])
    assert not matcher.is_error(), matcher.get_error()
    return places


def test_the_vocabulary_is_that_of_llguidances_own_reader(
    o200k: Path, read_whole: "tuple[LLTokenizer, Markers]"
) -> None:
    (read, markers), (other, others) = read_whole, vocabulary._of_file(o200k, NUM_TOKENS)
    assert markers == others
    assert read.vocab_size == other.vocab_size == NUM_TOKENS
    assert read.eos_tokens == other.eos_tokens == [SPECIAL_IDS["<|endoftext|>"]]
    for token in range(NUM_TOKENS):
        assert read.decode_bytes([token]) == other.decode_bytes([token])
        assert read.is_special_token(token) == other.is_special_token(token)
    for grammar in GRAMMARS:
        assert walk(read, grammar) == walk(other, grammar)


def test_texts_have_the_tokens_of_tokenizer_json(o200k: Path, read: "LLTokenizer") -> None:
    tokenizer, _ = read_tokenizer(o200k)
    tokenizer.encode_special_tokens = True
    texts = [Path(__file__).read_text(), Path("docs/log.md").read_text()[:200_000], "  \r\n\t\n 𝔘 ẞ e\u0301 <|end|>'ll"]
    for text in texts:
        assert read.tokenize_str(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_name_of_a_special_token_in_a_text_is_no_such_token(read: "LLTokenizer") -> None:
    allowed = [tokens for tokens, _ in walk(read, 'start: "{\\"mark\\": \\"<|end|>\\"}"')]
    assert all(len(tokens) == 1 for tokens in allowed[:-1])
    assert read.decode_bytes([tokens[0] for tokens in allowed if tokens]).startswith(b'{"mark": "<|end|>"}')


def _set(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("normalizer", to={"type": "NFC"}),
        _set("model", "type", to="Unigram"),
        _set("model", "byte_fallback", to=True),
        _set("model", "merges", 0, to=["!", "!!!!"]),  # by no rank
        _set("model", "merges", to=[["a", "no such token"]]),
        _set("model", "vocab", "a b", to=300_000),  # a character that stands for no byte
        _set("model", "vocab", "!!", to=7),  # of another token
        _set("decoder", to=None),
        _set("pre_tokenizer", to={"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}),
        _set("pre_tokenizer", "pretokenizers", 0, "behavior", to="Removed"),
        _set("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", to=True),
        _set("added_tokens", 3, "special", to=False),
        _set("added_tokens", 3, "lstrip", to=True),
        _set("added_tokens", 3, "id", to=5),
        _set("added_tokens", to=[]),
    ],
)
def test_what_is_not_as_tiktokens_is_left_to_llguidances_reader(
    o200k_content: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    assert ranks_of(json.dumps(o200k_content).encode()) is not None
    change(o200k_content)
    assert ranks_of(json.dumps(o200k_content).encode()) is None


@pytest.fixture
def o200k_content() -> dict[str, Any]:
    """A tokenizer.json as that of gpt-oss, but with few tokens."""
    from oscine.model.o200k import _tokenizer_json

    content = _tokenizer_json([*(bytes([byte]) for byte in range(256)), b"!!", b"!!!!", b" a"])
    del content["added_tokens"][10:]
    return content


def test_merges_may_be_written_as_texts(o200k_content: dict[str, Any]) -> None:
    before = ranks_of(json.dumps(o200k_content).encode())
    o200k_content["model"]["merges"] = [" ".join(merge) for merge in o200k_content["model"]["merges"]]
    assert ranks_of(json.dumps(o200k_content).encode()) == before


@pytest.mark.parametrize("text", [b"{}", b"[]", b"no JSON", b"\xff", b"[" * 100_000])
def test_a_broken_file_is_reported(tmp_path: Path, text: bytes) -> None:
    pytest.importorskip("llguidance", reason="it compiles grammars")
    (tmp_path / "tokenizer.json").write_bytes(text)
    assert ranks_of(text) is None
    with pytest.raises(ValueError, match="no grammars for "):
        read_vocabulary(tmp_path / "tokenizer.json", 100)


def test_another_tokenizer_is_read_by_llguidance(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path)
    assert ranks_of(read_text(file)) is None
    read, size = read_vocabulary(file, 1)[0], tokenizers.Tokenizer.from_file(str(file)).get_vocab_size()
    assert read.vocab_size == size
