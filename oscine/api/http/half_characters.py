"""JSON with halves of characters, as clients write it that cut a text in the middle of an emoji."""

import re
from typing import TypeVar

import msgspec

T = TypeVar("T")
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL
)
_HALF = 6  # bytes of an escape without its other half


def without_halves(text: bytes) -> bytes:
    """JSON of the same length, with U+FFFD for each lone surrogate among the escapes, which no UTF-8 can hold."""
    return _ESCAPES.sub(lambda found: rb"\ufffd" if len(found[0]) == _HALF else found[0], text)


def decode_json(text: bytes, kind: type[T]) -> T:
    """Raises what msgspec.json.decode raises, but for lone surrogates: they become U+FFFD."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        whole = without_halves(text)
        if whole == text:
            raise
    return msgspec.json.decode(whole, type=kind)
