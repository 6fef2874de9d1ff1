"""Bounds on the memory of bodies: the values in one, and the bytes of all together."""

from oscine.api.common.asgi import Scope
from oscine.api.common.errors import unavailable

MAX_BODIES_BYTES = 512 << 20  # of all requests together: their bytes and what is made of them
MAX_BATCHES_BYTES = 128 << 20  # the same for lines of batches, beside the requests of clients
MAX_VALUES = 1 << 18  # values and keys per JSON text
_FEW = 1024  # values and keys, also within texts, that are not counted exactly
FEW_BYTES = 32 << 20
_VALUE_BYTES = 48  # of one value or key: as decoded, and as the conversation that is made of it
_CONTAINER_BYTES = 400  # the same of a list or object, beside its values
_CONTAINERS = b"[{"
_BEFORE_VALUES = b",:[{"  # one of these precedes each value and key, except the first
_HELD = "oscine.held"  # in an ASGI scope


def memory_of(text: bytes) -> int:
    """Bytes that the values of a JSON text will take, counted before it is decoded. Raises ValueError for more than
    MAX_VALUES values and keys.

    Decoding is one call that nothing can interrupt. The limit bounds its time and its memory.
    """
    values = _marks(text, _BEFORE_VALUES)
    if values > min(_FEW, MAX_VALUES):
        text = _without_texts(text)
        values = _marks(text, _BEFORE_VALUES)
        if values > MAX_VALUES:
            raise _too_many()
    return _VALUE_BYTES * values + _CONTAINER_BYTES * _marks(text, _CONTAINERS)


def _without_texts(text: bytes) -> bytes:
    """JSON without what stands between quotation marks."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark begins or ends a text
    if plain.count(b'"') // 2 > MAX_VALUES:
        raise _too_many()
    return b"".join(plain.split(b'"')[::2])


def _too_many() -> ValueError:
    return ValueError(f"it holds more than {MAX_VALUES} JSON values")


def _marks(text: bytes, marks: bytes) -> int:
    return len(text) - len(text.translate(None, marks))  # one pass; `count` would need one for each


class Bodies:
    """Counts the memory of the bodies of all unfinished requests; each body is held until its request is over."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: in bytes; None: MAX_BODIES_BYTES."""
        self._bytes = 0
        self._limit = limit

    @property
    def are_few(self) -> bool:
        """Whether they take so little that the collector can look at all of it without a pause."""
        return self._bytes <= FEW_BYTES

    def take(self, size: int) -> None:
        """Raises APIError 503 if there is no room; memory taken before stays taken."""
        if self._bytes + size > (self._limit or MAX_BODIES_BYTES):
            raise unavailable("The server holds as many large requests as it can.", code="overloaded")
        self._bytes += size

    def give_back(self, size: int) -> None:
        self._bytes -= size


class Held:
    """The memory of one request. Context manager: all is given back in the end."""

    def __init__(self, bodies: Bodies, scope: Scope) -> None:
        self._bodies, self._bytes = bodies, 0
        scope[_HELD] = self

    @staticmethod
    def of(scope: Scope) -> "Held":
        held: Held = scope[_HELD]
        return held

    def take(self, size: int) -> None:
        """Raises APIError 503."""
        self._bodies.take(size)
        self._bytes += size

    def give_back(self) -> None:
        self._bodies.give_back(self._bytes)
        self._bytes = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.give_back()
