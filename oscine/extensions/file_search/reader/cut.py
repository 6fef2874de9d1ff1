"""Cuts a text into chunks of so many tokens, each of which shares some with the one before it."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from oscine.chat.tokenizer import Tokenizer

_PIECE = 16_384  # characters that are encoded at once; a word across the end of a piece may have other tokens


def chunks(texts: Iterable[str], tokenizer: Tokenizer, size: int, overlap: int) -> Iterator[str]:
    """`size` and `overlap`: tokens of a chunk, and those that it shares. A character is never cut in two."""
    data = bytearray()  # of tokens that are not in a whole chunk yet
    ends: list[int] = []  # of these tokens in `data`
    has_new = False  # tokens that are in no chunk
    for piece in _pieces(texts):
        encoded = piece.encode(errors="surrogatepass")
        lengths = (len(tokenizer.token_bytes(token)) for token in tokenizer.encode(piece))
        ends += (len(data) + min(end, len(encoded)) for end in accumulate(lengths))
        data += encoded
        ends[-1:] = [len(data)]  # a vocabulary may lack bytes
        has_new = True
        while len(ends) > size:
            yield _text(data, _whole(data, ends[size - 1]))
            step = _whole(data, ends[size - overlap - 1])
            ends = [end - step for end in ends[size - overlap :]]
            del data[:step]
            has_new = len(ends) > overlap
    if has_new:
        yield _text(data, len(data))


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of at most _PIECE characters, which end with a line or a word if they can."""
    left = ""
    for text in texts:
        left += text
        while len(left) > _PIECE:
            end = max(left.rfind("\n", 0, _PIECE), left.rfind(" ", 0, _PIECE)) + 1
            if end < _PIECE // 2:
                end = _PIECE
            yield left[:end]
            left = left[end:]
    if left:
        yield left


def _whole(data: bytearray, end: int) -> int:
    """The end of a token, moved back to the end of a character."""
    while 0 < end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _text(data: bytearray, end: int) -> str:
    return data[:end].decode(errors="replace")
