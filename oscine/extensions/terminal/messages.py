'''The messages that a person types: with a line editor at a terminal, else one per line.

A paste is one message. A message that begins with """ goes on until the next """, as in Ollama.
'''

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
_BEFORE_QUOTES = ("", "/system")


def reader(history: Path) -> AbstractContextManager[Callable[[], str]]:
    """Reads the next message; it raises EOFError at the end. `history`: file of earlier messages."""
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    return editor(history) if sys.stdin.isatty() and out.isatty() else nullcontext(read_lines)


def read_lines() -> str:
    """A line, or several that quotes hold together."""
    text = input()
    with suppress(EOFError):
        while is_open(text):
            text += "\n" + input()
    return text


def is_open(text: str) -> bool:
    """Whether more lines follow."""
    before, quotes, inside = text.partition(QUOTES)
    return bool(quotes) and before.strip() in _BEFORE_QUOTES and QUOTES not in inside


def unquoted(text: str) -> str:
    """The message without its quotes; text in which they stand for something else stays as it is."""
    before, quotes, inside = text.partition(QUOTES)
    inside, _, after = inside.partition(QUOTES)
    if quotes and before.strip() in _BEFORE_QUOTES and not after.strip():
        return before + inside.strip("\n")
    return text


@contextmanager
def editor(history: Path) -> Iterator[Callable[[], str]]:
    """A paste is one message also if it comes while there is no prompt: while a model loads, or answers."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import create_output

    goes_on = Condition(lambda: is_open(get_app().current_buffer.text))
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=goes_on,
        prompt_continuation="  ",
        history=_history(history),
        key_bindings=_keys(),
        output=None if sys.stdout.isatty() else create_output(sys.stderr),
    )

    def expect_pastes() -> None:
        session.output.enable_bracketed_paste()
        session.output.flush()

    def read() -> str:
        try:
            return session.prompt()
        finally:
            expect_pastes()

    expect_pastes()
    try:
        yield read
    finally:
        session.output.disable_bracketed_paste()
        session.output.flush()


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    # alt-Enter; Enter sends the message
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


def _history(path: Path) -> "History":
    """The history of messages, kept in the file where possible, with access for its owner only."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    try:
        _make_private(path)
    except OSError:
        return InMemoryHistory()
    return Kept(path)


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a file")
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
