"""Text to token ids and back, over a checkpoint's tokenizer.json.

The ids of harmony's special tokens differ between models.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import tokenizers

from oscine.model.o200k import BYTE_CHARACTERS
from oscine.model.tokenizer_file import is_panic, read_tokenizer
from oscine.system.model_files import shown

_SLICE = 16_384  # characters
_LONGER = 8  # times: the next slice that is tried where one holds no whole word
_UNSURE_WORDS = 2  # at the end of a slice: "'" and "l" of "we'll", or spaces before a word

SPECIAL_TOKENS = {
    "start": "<|start|>",
    "end": "<|end|>",
    "message": "<|message|>",
    "channel": "<|channel|>",
    "constrain": "<|constrain|>",
    "return_": "<|return|>",
    "call": "<|call|>",
    "endoftext": "<|endoftext|>",
}

_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def _well_formed(text: str) -> str:
    """The text with U+FFFD for each lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _num_bytes(text: str) -> int:
    """The length of a text in UTF-8, which is the most tokens that it can have."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


class _ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled as ids are met; ids outside of the vocabulary have none."""

    def __init__(self, inner: tokenizers.Tokenizer, added: dict[int, str]) -> None:
        super().__init__()
        self._inner = inner
        self._added = added

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._added:
            token = self._added[token_id].encode()
        else:
            characters = self._inner.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if characters is None:
                return b""  # not cached: such ids are unbounded
            token = bytes(_BYTE_OF_CHARACTER[c] for c in characters)
        self[token_id] = token
        return token


class _TextTable(dict[int, "str | None"]):
    """Token id -> its text; None for special and unknown ids and for tokens that are not whole UTF-8 by themselves."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        if self._tokenizer.is_special(token_id):
            return None
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self._tokenizer.token_bytes(token_id).decode()
        self[token_id] = text
        return text


class EncodingError(ValueError):
    """The tokenizer failed on a text."""


class Tokenizer:
    """A byte-level BPE vocabulary with the harmony special tokens.

    The ids of special tokens are the attributes start, end, message, channel, constrain, return_, call and endoftext;
    turn_end_ids are those that end the model's turn. Ids outside of the vocabulary count as special and have no bytes
    (the embedding is larger than the vocabulary). No prompt has an id above max_prompt_id: special tokens beyond it are
    never used.
    """

    start: int
    end: int
    message: int
    channel: int
    constrain: int
    return_: int
    call: int
    endoftext: int

    def __init__(self, folder: str | Path) -> None:
        """Reads tokenizer.json in `folder`, or the file itself. Raises ValueError naming the file and what it lacks."""
        path = Path(folder)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.exists():
            raise ValueError(f"tokenizer file {self.path} does not exist")
        self._inner, _ = read_tokenizer(self.path)
        self._inner.encode_special_tokens = True  # special tokens within text are plain text
        added = self._inner.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._words_are_apart = len(self._special) == len(added)  # else a token may span what are words in a slice
        contents = {token_id: token.content for token_id, token in added.items()}
        id_of = {contents[token_id]: token_id for token_id in self._special}
        for attribute, content in SPECIAL_TOKENS.items():
            if content not in id_of:
                raise ValueError(f"{self.path} has no special token {content}")
            setattr(self, attribute, id_of[content])
        self.turn_end_ids = (self.return_, self.call, self.endoftext)
        vocabulary: dict[str, int] = self._inner.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        named = {getattr(self, attribute) for attribute in SPECIAL_TOKENS}
        self.max_prompt_id = max(named.union(vocabulary.values()) - (self._special - named))
        strange = set().union(*vocabulary.keys() - contents.values()) - _BYTE_OF_CHARACTER.keys()
        if strange:
            raise ValueError(f"{self.path} is not a byte-level vocabulary: a token has {min(strange)!r}")
        self._bytes = _ByteTable(self._inner, contents)
        self.texts = _TextTable(self)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, never a special id. Lone surrogates become U+FFFD. Other threads go on meanwhile.

        Raises EncodingError where the tokenizer fails.
        """
        try:
            return [*chain.from_iterable(self._slices(text))]
        except TypeError:  # how the library refuses lone surrogates
            return [*chain.from_iterable(self._slices(_well_formed(text)))]

    def _slices(self, text: str, *, cuts_words: bool = False) -> Iterator[list[int]]:
        """The ids of a text, slice by slice. A slice ends with a word whose tokens do not depend on what comes after.

        Making a list of ids, or freeing it, keeps the GIL: a long list would delay the event loop. A word that is
        longer than a slice makes a longer one; with `cuts_words` it is cut, which changes few tokens.
        """
        start, size = 0, _SLICE
        while start + size < len(text) and self._words_are_apart:
            encoding = self._encoded(self._inner.encode_batch, text[start : start + size])
            ids: list[int] = encoding.ids
            words = encoding.word_ids  # ascending
            last = words[-1] or 0 if words else 0
            sure = bisect_left(words, last + 1 - _UNSURE_WORDS, key=lambda word: word or 0)
            said = self.decode(ids[:sure])
            if said and text.startswith(said, start):  # a vocabulary may lack bytes
                start += len(said)
                yield ids[:sure]
            elif cuts_words:
                start += size
                yield ids
            else:
                size *= _LONGER
                continue
            size = _SLICE
        # A batch of one, because `encode` keeps the GIL: a long text would hold up the event loop from any thread.
        yield self._encoded(self._inner.encode_batch_fast, text[start:]).ids

    def _encoded(self, encode: Callable[..., list[tokenizers.Encoding]], text: str) -> tokenizers.Encoding:
        """What a method of the library for batches makes of one text. Raises EncodingError where it panics."""
        try:
            (encoding,) = encode([text], add_special_tokens=False)
        except BaseException as error:
            if is_panic(error):
                raise EncodingError(f"{self.path} fails on a text: {shown(error)}") from None
            raise
        return encoding

    def exceeds(self, texts: Sequence[str], most: int) -> bool:
        """Whether texts certainly have more than `most` tokens. `most` bounds the cost of finding out.

        Encoding takes 250 bytes per token, so a large body could take gigabytes. Texts too short for that are not
        examined. The cuts between slices change few tokens.
        """
        if sum(map(_num_bytes, texts)) <= most:
            return False
        sure = most + most // 8
        for text in texts:
            for start in range(0, len(text), _SLICE):
                sure -= len(self.encode(text[start : start + _SLICE]))
                if sure < 0:
                    return True
        return False

    def count(self, texts: Sequence[str], most: int | None = None) -> int:
        """The number of ids of all texts, at most `most`. Encodes one slice of a text at a time.

        Exact, unless a single word is longer than a slice: it is cut, as encoding it whole takes seconds.
        """
        total = 0
        for text in texts:
            for ids in self._slices(_well_formed(text), cuts_words=True):
                total += len(ids)
                if most is not None and total >= most:
                    return most
        return total

    def decode(self, token_ids: list[int]) -> str:
        """The text of all ids, special tokens by name; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self._bytes.__getitem__, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token: a special token's name, nothing for an id outside of the vocabulary."""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the id stands for no text: a special token, or an id outside of the vocabulary."""
        return token_id in self._special or not self.token_bytes(token_id)
