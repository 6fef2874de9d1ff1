"""The vocabulary of grammars: tokenizer.json as llguidance wants it.

Its libraries hold Python's lock while they read, and a start waits for that. A tokenizer.json made of tiktoken's data
is given to llguidance as such: tokens that merge by their rank. That takes half the time of its own reader, and the
name of a special token in the text of a grammar, as in `"<|end|>"`, stays text.
"""

import json
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oscine.executor.batch.slots import IntArray
from oscine.model.o200k import BYTE_CHARACTERS
from oscine.model.tokenizer_file import library_errors, read_text, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END = "<|endoftext|>"
_MAX_UNUSED = 1 << 16  # ids that a vocabulary may have beyond the model's
# Sets of tokens that are checked together where all of them are allowed: spaces, and text of up to this many characters
# without JSON escapes. With few lengths, strings with a maximum length take twice the time.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{length}}}" for length in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30)),
    f"{_TEXT}+",
]
_BYTES = {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}
_BETWEEN = "\u2000"  # stands for no byte, and is none
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_UNWANTED = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token


class Markers(NamedTuple):
    """The tokens that begin a harmony header, and <|message|>, which ends it; -1 if the vocabulary lacks it."""

    start: int
    end: int
    channel: int
    message: int

    @property
    def begin(self) -> tuple[int, int, int]:
        return self.start, self.end, self.channel

    def among(self, ids_M: IntArray) -> NDArray[np.bool_]:
        """Which tokens begin a header."""
        found_M: NDArray[np.bool_] = (ids_M == self.start) | (ids_M == self.end) | (ids_M == self.channel)
        return found_M


class Ranks(NamedTuple):
    """What tiktoken has of a vocabulary."""

    rank_of: dict[bytes, int]  # by the bytes of an ordinary token
    special: dict[str, int]  # ids by name
    pattern: str  # a text is cut into its matches


def read_vocabulary(file: Path, vocab_size: int) -> tuple["LLTokenizer", Markers]:
    """`vocab_size`: of the logits. Raises ValueError."""
    with library_errors(f"no grammars for {file}"):
        ranks = ranks_of(read_text(file))
        return _of_file(file, vocab_size) if ranks is None else _of_ranks(ranks, vocab_size)


def _of_ranks(ranks: Ranks, vocab_size: int) -> tuple["LLTokenizer", Markers]:
    from llguidance import LLTokenizer

    last = max(max(ranks.rank_of.values()), max(ranks.special.values()))
    num_tokens, end = _num_tokens(last, vocab_size), ranks.special[_END]
    named = {"encoder": ranks.rank_of, "special_tokens": ranks.special, "pattern": ranks.pattern}
    vocabulary = LLTokenizer.from_tiktoken(**named, eos_token=end, n_vocab=num_tokens, slices=SLICES)  # type: ignore[attr-defined]
    return vocabulary, _markers(ranks.special.get(f"<|{name}|>") for name in Markers._fields)


def _of_file(file: Path, vocab_size: int) -> tuple["LLTokenizer", Markers]:
    """Any tokenizer.json."""
    from llguidance import LLTokenizer

    tokenizer, text = read_tokenizer(file)
    num_tokens = _num_tokens(max(tokenizer.get_vocab().values()), vocab_size)
    vocabulary = LLTokenizer(text, n_vocab=num_tokens, eos_token=tokenizer.token_to_id(_END), slices=SLICES)
    return vocabulary, _markers(tokenizer.token_to_id(f"<|{name}|>") for name in Markers._fields)


def _num_tokens(last: int, vocab_size: int) -> int:
    if last >= vocab_size + _MAX_UNUSED:
        raise ValueError(f"it has ids up to {last}, and the model has {vocab_size} tokens")
    return max(1 + last, vocab_size)


def _markers(ids: Iterable[int | None]) -> Markers:
    return Markers(*(-1 if token is None else token for token in ids))


def ranks_of(text: bytes) -> Ranks | None:
    """None for a tokenizer.json that is not as tiktoken's, or is broken: llguidance's reader says what is wrong."""
    try:
        return _ranks(json.loads(text))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _ranks(file: Any) -> Ranks | None:
    model, added = file["model"], file["added_tokens"]
    split, byte_level = file["pre_tokenizer"]["pretokenizers"]
    types = model["type"], file["pre_tokenizer"]["type"], file["decoder"]["type"]
    is_plain = (
        types == ("BPE", "Sequence", "ByteLevel")
        and file.get("normalizer") is None
        and not any(map(model.get, _UNWANTED))
        and split.items() >= _SPLIT.items()
        and byte_level.items() >= _BYTE_LEVEL.items()
        and all(token["special"] and not any(map(token.get, _FLAGS)) for token in added)
    )
    vocab: dict[str, int] = model["vocab"]
    special: dict[str, int] = {token["content"]: token["id"] for token in added}
    merged = [*map(vocab.__getitem__, _joined(model["merges"]))]
    if not is_plain or _END not in special or merged != sorted(merged):
        return None
    rank_of = dict(zip(_bytes_of(vocab), vocab.values(), strict=True))
    num_ids = len({*rank_of.values(), *special.values()})
    if num_ids < len(vocab) + len(added) or not all(bytes([byte]) in rank_of for byte in range(256)):
        return None
    return Ranks(rank_of, special, split["pattern"]["Regex"])


def _joined(merges: list[Any]) -> Iterable[str]:
    """The tokens that merges make. A merge is a pair, or a text: "left right"."""
    if merges and isinstance(merges[0], str):
        return map(str.replace, merges, repeat(" "), repeat(""))
    return map("".join, merges)


def _bytes_of(tokens: Iterable[str]) -> list[bytes]:
    """Raises ValueError for a character that stands for no byte."""
    joined = _BETWEEN.join(tokens)
    if strange := {*joined} - {*BYTE_CHARACTERS, _BETWEEN}:
        raise ValueError(f"no byte-level vocabulary: a token has {min(strange)!r}")
    return [token.encode("latin-1") for token in joined.translate(_BYTES).split(_BETWEEN)]
