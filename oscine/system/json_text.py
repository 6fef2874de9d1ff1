"""JSON with lone surrogates: clients write one when they cut a text in the middle of an emoji."""

import re
from typing import AnyStr, TypeVar

import msgspec

T = TypeVar("T")
_SURROGATES = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_ESCAPE = 6  # bytes
_MAX_SURROGATES = 100_000  # to look at, which takes some 50 ms: a body with more stays as it is


def replace_lone_surrogates(text: bytes) -> bytes:
    """JSON of the same length, with U+FFFD for each lone surrogate among the escapes, which no UTF-8 can hold."""
    pieces: list[bytes] = []
    end = 0
    for number, found in enumerate(_SURROGATES.finditer(text)):
        if number == _MAX_SURROGATES:
            return text
        start, is_pair = found.start(), len(found[0]) > _ESCAPE
        if _is_escaped(text, start):  # then the first of two is text, and the second one has no partner
            start += _ESCAPE
        if is_pair == (start > found.start()):
            pieces += (text[end:start], rb"\ufffd")
            end = start + _ESCAPE
    return b"".join((*pieces, text[end:])) if pieces else text


def _is_escaped(text: bytes, at: int) -> bool:
    """Whether a backslash belongs to the one before it: the number of those before it is odd."""
    size = 64
    while True:
        before = text[max(0, at - size) : at]
        count = len(before) - len(before.rstrip(b"\\"))
        if count < len(before) or size >= at:
            return count % 2 == 1
        size *= 8


def decode_whole(text: AnyStr, kind: type[T]) -> tuple[AnyStr, T]:
    """The JSON with U+FFFD for lone surrogates, and its value. Raises what msgspec.json.decode raises for others."""
    try:
        return text, msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        whole: AnyStr
        if isinstance(text, str):
            whole = replace_lone_surrogates(text.encode()).decode()
        else:
            whole = replace_lone_surrogates(text)
        if whole == text:
            raise
    return whole, msgspec.json.decode(whole, type=kind)


def decode_json(text: AnyStr, kind: type[T]) -> T:
    """Raises what msgspec.json.decode raises, but for lone surrogates: they become U+FFFD."""
    return decode_whole(text, kind)[1]
