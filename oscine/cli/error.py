"""The failure of a command: one line on stderr and an exit status."""

from collections.abc import Iterator
from contextlib import contextmanager

FAILED, USAGE, WRONG, INTERRUPTED = 1, 2, 3, 130  # WRONG: what was to be checked is wrong


class CommandError(Exception):
    """Ends the command; the message is printed as one line."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


@contextmanager
def ended_by(*errors: type[Exception], status: int = FAILED) -> Iterator[None]:
    """Such an error ends the command, with its message."""
    try:
        yield
    except errors as error:
        raise CommandError(_text(error), status) from None


def _text(error: Exception) -> str:
    """Of the system's errors about a file, without their number."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}"
    return str(error)
