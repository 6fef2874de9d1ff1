"""What can go wrong with a request, as exceptions of Python."""

from collections.abc import Iterator
from contextlib import contextmanager

from oscine.api.common.errors import APIError
from oscine.engine.wire.stream import EngineError


class RequestError(ValueError):
    """A request that cannot be honoured. The same request would fail again."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        """`param`: the parameter at fault. `code`: as in the HTTP API, such as context_length_exceeded."""
        super().__init__(message)
        self.param, self.code = param, code


class LostEngineError(RuntimeError):
    """The engine could not be started, or ended while the request ran. An engine that ended is started again."""


@contextmanager
def translated() -> Iterator[None]:
    """Turns errors of the server's parts into exceptions of this module."""
    try:
        yield
    except APIError as error:
        if error.status < 500:
            raise RequestError(error.message, error.param, error.code) from None
        raise LostEngineError(error.message) from None
    except EngineError as error:
        raise LostEngineError(str(error)) from None
