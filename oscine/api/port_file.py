"""The file of --port-file, from which another process reads the port of the server."""

import os
import tempfile
from pathlib import Path
from typing import IO


class PortFile:
    """Receives one line, the port number, once the server listens.

    A regular file appears by a rename, with its line. A pipe, a descriptor or a device is written to.
    """

    def __init__(self, path: str) -> None:
        """Removes the file of an earlier server; waits for the reader of a named pipe. Raises OSError."""
        self._stream: IO[str] | None = None
        self._target = Path(os.path.realpath(path))
        if path.startswith(("/dev/", "/proc/")) or (self._target.exists() and not self._target.is_file()):
            self._stream = open(path, "a")  # noqa: SIM115
            return
        with tempfile.TemporaryFile(dir=self._target.parent):  # fails now where the file could not be written later
            self._target.unlink(missing_ok=True)

    def write(self, port: int) -> None:
        """Raises OSError."""
        line = f"{port}\n"
        if self._stream is not None:
            with self._stream:
                self._stream.write(line)
            return
        part = self._target.with_name(f".{self._target.name}.{os.getpid()}")
        part.write_text(line)
        part.replace(self._target)

    def close(self) -> None:
        """Ends the reader's wait if the port was not written."""
        if self._stream is not None:
            self._stream.close()
