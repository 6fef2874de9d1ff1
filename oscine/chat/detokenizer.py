"""Token ids to text, a few at a time."""

import codecs
from collections.abc import Iterable

from oscine.chat.tokenizer import Tokenizer


class Detokenizer:
    """Holds back the bytes of a character until it is whole; invalid bytes become U+FFFD and hold nothing back.

    The joined text does not depend on how the ids are divided into calls. Special ids and ids outside of the vocabulary
    are skipped.
    """

    __slots__ = ("_held", "_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.texts
        self._held = b""  # at most three bytes that start a character

    def add(self, token_id: int) -> str:
        """The text that one more token completes, often all of its own."""
        text = self._texts[token_id]
        if text is not None and not self._held:
            return text
        if self._tokenizer.is_special(token_id):
            return ""
        data = self._held + self._tokenizer.token_bytes(token_id)
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._held = data[consumed:]
        return text

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        """U+FFFD for a character that was never completed."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text
