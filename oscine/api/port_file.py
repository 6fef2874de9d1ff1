"""The file of --port-file, from which another process reads the port of the server."""

import os
from pathlib import Path


class PortFile:
    """Receives one line, the port number, once the server listens.

    A regular file is written under another name, then renamed. A pipe, a link or a device at the path is written to.
    """

    def __init__(self, path: str) -> None:
        """Removes the file of an earlier server; waits for the reader of a named pipe. Raises OSError."""
        self._target = Path(path)
        self._part: Path | None = None
        if not os.path.lexists(path) or (self._target.is_file() and not self._target.is_symlink()):
            self._part = self._target.with_name(f"{self._target.name}.part")
            for old in (self._target, self._part):
                old.unlink(missing_ok=True)
        self._file = open(self._part or path, "w" if self._part is None else "x")  # noqa: SIM115

    def write(self, port: int) -> None:
        """Raises OSError."""
        with self._file:
            self._file.write(f"{port}\n")
        if self._part is not None:
            self._part.replace(self._target)

    def close(self) -> None:
        """Closes the file. Removes it if the port was not written."""
        self._file.close()
        if self._part is not None:
            self._part.unlink(missing_ok=True)
