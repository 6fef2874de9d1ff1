"""The parent of an engine process, at the other end of its stdin: the engine lives as long as that is open.

Knows what the parent can want, and how the process ends; nothing of requests or clients.
"""

import contextlib
import os
import sys
import threading

STOP = b"stop\n"  # asks the engine to take its leave of its clients, and to end


class Parent:
    """Listens in a thread of its own, so that neither a long step nor a start is in the way."""

    def __init__(self, address: str) -> None:
        """`address` is the engine's own, whose socket and folder nobody needs once it ends."""
        self.asks_to_stop = False
        self._address = address
        self._asked, self._ask = os.pipe()

    def listen(self) -> None:
        """To be called once the socket is there: what ends the process before that would leave it behind."""
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
        socket = self._address.removeprefix("ipc://")
        with contextlib.suppress(OSError):  # the folder may be somebody else's too, or gone with the parent
            os.unlink(socket)
            os.rmdir(os.path.dirname(socket))
        os._exit(0)
