"""The parent of an engine process, at the other end of its stdin: the engine lives as long as that is open."""

import contextlib
import os
import re
import signal
import sys
import threading
from pathlib import Path

from oscine.system.owned_folder import MARK, Kind, is_marked

SOCKETS = Kind("engine", re.compile("engine"))  # the folder of an engine's socket, which the parent makes
STACKS = signal.SIGUSR1  # makes the engine write the stacks of its threads to stderr, and end
STOP = b"stop\n"  # asks the engine to notify its clients and to end


class Parent:
    """Listens in a thread of its own, so that neither a long step nor a start is in the way."""

    def __init__(self, address: str) -> None:
        """`address`: the engine's own; its socket and folder are removed at the end."""
        self.asks_to_stop = False
        self._address = address
        self._asked, self._ask = os.pipe()

    def listen(self) -> None:
        """Call it once the socket exists: an end of the process before that would leave the socket behind."""
        threading.Thread(target=self._listen, daemon=True).start()

    def fileno(self) -> int:
        """Can be read once the parent asks to stop."""
        return self._asked

    def _listen(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin, whose lock could not be had again at exit
            self.asks_to_stop = True
            os.write(self._ask, b"\0")
        self.leave()

    def leave(self) -> None:
        """Ends the process at once: nothing in it is worth keeping."""
        socket = Path(self._address.removeprefix("ipc://"))
        with contextlib.suppress(OSError):  # both may be gone with the parent
            socket.unlink()
            if is_marked(SOCKETS, socket.parent):
                (socket.parent / MARK).unlink()
                socket.parent.rmdir()
        os._exit(0)
