"""The output of `oscine chat`: dimmed reasoning, then the answer; plain text if the output is not a terminal."""

import os
from typing import TextIO

from oscine.extensions.terminal.wrap import Wrapper

_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class Terminal:
    """Writes one answer at a time: reasoning, answer and notes are separate paragraphs.

    Lines are broken at spaces if `out` is a terminal.
    """

    def __init__(self, out: TextIO, *, color: bool) -> None:
        self._out = out
        self._color = color
        self._kind = ""  # of what was written last
        self._at_line_start = True
        self._dim = False
        self._wrapper = Wrapper(self._width) if out.isatty() else None

    def reasoning(self, text: str) -> None:
        self._write("reasoning", text, dim=True)

    def answer(self, text: str) -> None:
        self._write("answer", text, dim=False)

    def note(self, text: str) -> None:
        """A paragraph of its own, about the answer and not part of it."""
        self.end()
        self._write("note", text, dim=True)
        self.end()

    def end(self) -> None:
        """Ends the paragraph; what follows begins a new answer."""
        self._end_text()
        self._set_dim(False)
        if not self._at_line_start:
            self._out.write("\n")
        self._kind = ""
        self._at_line_start = True
        self._out.flush()

    def _write(self, kind: str, text: str, *, dim: bool) -> None:
        if not text:
            return
        if self._kind and kind != self._kind:
            self._end_text()
            self._out.write("\n" if self._at_line_start else "\n\n")
        self._set_dim(dim)
        self._kind = kind
        self._at_line_start = text.endswith("\n")
        self._out.write(text if self._wrapper is None else self._wrapper.add(text))
        self._out.flush()

    def _end_text(self) -> None:
        if self._wrapper is not None:
            self._out.write(self._wrapper.end())

    def _width(self) -> int:
        return os.get_terminal_size(self._out.fileno()).columns

    def _set_dim(self, dim: bool) -> None:
        if self._color and dim != self._dim:
            self._out.write(_DIM if dim else _RESET)
        self._dim = dim
