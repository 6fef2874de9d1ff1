"""Random texts with a known number of tokens, for any byte-level BPE vocabulary such as gpt-oss's."""

import json
import re
from pathlib import Path

import numpy as np

from oscine.system.model_files import MAX_TOKENIZER_BYTES, read_file

_SPACE = "Ġ"  # a space, in the characters of byte-level vocabularies
_WORD = re.compile("[a-z]{3,}")
_LEAST = 16  # with fewer words, random texts would resemble each other


class Words:
    """Words that are one token each, with a space before them and without: n words are n tokens."""

    def __init__(self, vocabulary: dict[str, int], seed: int) -> None:
        found = sorted(word for word in vocabulary if _WORD.fullmatch(word) and _SPACE + word in vocabulary)
        if len(found) < _LEAST:
            raise ValueError(f"--tokenizer has {len(found)} words of one token, and texts need {_LEAST}")
        self._words = np.array(found)
        self._ids = np.array([vocabulary[_SPACE + word] for word in found])
        self._random = np.random.default_rng(seed)

    @classmethod
    def of(cls, folder: Path, seed: int) -> "Words":
        """Reads tokenizer.json in `folder`, or the file itself. Raises ValueError."""
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            vocabulary = dict(json.loads(read_file(path, MAX_TOKENIZER_BYTES))["model"]["vocab"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"--tokenizer {folder} has no vocabulary: {type(error).__name__}: {error}") from None
        return cls(vocabulary, seed)

    def text(self, num_tokens: int) -> str:
        return " ".join(self._random.choice(self._words, num_tokens))

    def ids(self, num_tokens: int) -> list[int]:
        picked: list[int] = self._random.choice(self._ids, num_tokens).tolist()
        return picked
