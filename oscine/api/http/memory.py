"""Bounds on the memory of bodies: the values in one, and the bytes of all together."""

from oscine.api.http.errors import unavailable
from oscine.api.http.work import Trimmer

MAX_BODIES_BYTES = 512 << 20  # of all requests together: their bytes and their decoded objects
MAX_VALUES = 1 << 18  # values and keys per JSON text
_VALUE_BYTES = 96  # approximate size of one decoded value
_BEFORE_VALUES = b",:[{"  # one of these precedes each value and key, except the first


def check_values(text: bytes) -> None:
    """Raises ValueError for JSON with more than MAX_VALUES values and keys. Checked before decoding.

    Decoding is one call that nothing can interrupt. This bounds its time and its memory.
    """
    if _marks(text) <= MAX_VALUES:
        return
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark begins or ends a string
    strings = plain.count(b'"') // 2
    if strings > MAX_VALUES or _marks(b"".join(plain.split(b'"')[::2])) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} JSON values")


def _marks(text: bytes) -> int:
    return len(text) - len(text.translate(None, _BEFORE_VALUES))  # one pass; `count` would need four


def values_of(piece: bytes, earlier: int) -> int:
    """Upper bound of the values in a piece of a body, after `earlier` ones. No body is decoded to more."""
    return min(_marks(piece), MAX_VALUES - earlier)


def memory_of(piece: bytes, values: int) -> int:
    """Bytes that a piece of a body takes until its request is over: as received and as objects."""
    return len(piece) + _VALUE_BYTES * values


class Bodies:
    """Counts the memory of the bodies of all unfinished requests; each body is held until its request is over."""

    def __init__(self) -> None:
        self._bytes = 0
        self._trimmer = Trimmer()

    def take(self, size: int) -> None:
        """Raises APIError 503 if there is no room; memory taken before stays taken."""
        if self._bytes + size > MAX_BODIES_BYTES:
            raise unavailable("The server holds as many large requests as it can.", code="overloaded")
        self._bytes += size

    def give_back(self, size: int) -> None:
        self._bytes -= size
        self._trimmer.freed(size)
