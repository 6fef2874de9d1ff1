"""Text that arrives in pieces, broken at spaces to a width. Fenced code blocks keep their lines."""

import re
import unicodedata
from collections.abc import Callable

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")
_FENCES = ("```", "~~~")


class Wrapper:
    """Turns pieces of text into what may be written already: a word is held until it is whole.

    `width`: the columns of the terminal at present; 0 breaks no line.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._start_of_text()

    def _start_of_text(self) -> None:
        self._fence = ""  # that ends the code block; empty outside of one
        self._start_of_line()

    def _start_of_line(self) -> None:
        self._column = 0  # of the cursor, without the spaces
        self._spaces = self._word = ""  # what is held
        self._is_first = True  # word of its line

    def add(self, text: str) -> str:
        return "".join(self._take(piece) for piece in _PIECES.findall(text))

    def end(self) -> str:
        """What is held. What is added next begins a line."""
        written = self._end_word()
        self._start_of_text()
        return written

    def _take(self, piece: str) -> str:
        if piece == "\n":
            written = self._end_word() + piece
            self._start_of_line()
        elif piece.isspace():
            written = self._end_word()
            self._spaces += piece
        else:
            written = self._add_word(piece)
        return written

    def _add_word(self, text: str) -> str:
        """Scripts that put no spaces between words may be broken at each of their wide characters."""
        written = ""
        for char in text:
            if columns(char) == 2:
                written += self._end_word()
            self._word += char
            if columns(char) == 2:
                written += self._end_word()
        return written

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        self._see_fence(word)
        spaces, self._spaces = self._spaces, ""
        needed = columns(word)
        width = 0 if self._fence else self._width()
        if width and self._column and self._column + columns(spaces) + needed > width:
            self._column = needed
            return "\n" + word
        self._column += columns(spaces) + needed
        return spaces + word

    def _see_fence(self, word: str) -> None:
        fence, first = word[:3], self._is_first
        self._is_first = False
        if first and fence in _FENCES and self._fence in ("", fence):
            self._fence = "" if self._fence else fence


def columns(text: str) -> int:
    """The columns of a terminal that the text takes. A tab counts as eight."""
    return sum(map(_columns_of, text))


def _columns_of(char: str) -> int:
    if char == "\t":
        return 8
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
