"""What a process leaves on its machine, and whether another process finds it: of one machine, or of another one.

    python -m tests.nodes.traces leave    leaves one of each kind, and lives until it is killed
    python -m tests.nodes.traces find [ADDRESS]    prints as JSON which kinds it finds

`port` is found on ADDRESS, if that is given: the one thing that nodes share is a network.
"""

import ctypes
import json
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

_NAME, _PORT, _KEY = "oscine-trace", 7777, 0x0C0C
_IPC_CREAT = 0o1000
_FILES = [Path(folder, _NAME) for folder in ("/tmp", "/dev/shm", "/var/tmp")]
_libc = ctypes.CDLL(None, use_errno=True)


def leave() -> None:
    for path in _FILES:
        path.write_text("here")
    shared = SharedMemory(f"{_NAME}-posix", create=True, size=16)
    segment = _libc.shmget(_KEY, 16, _IPC_CREAT | 0o600)
    listeners = []
    for family, address in (
        (socket.AF_UNIX, f"/tmp/{_NAME}.socket"),
        (socket.AF_UNIX, f"\0{_NAME}"),
        (socket.AF_INET, ("0.0.0.0", _PORT)),
    ):
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        listeners.append(listener)
    assert segment >= 0
    print(f"ready: {shared.size} bytes", flush=True)
    signal.pause()


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _connects(family: int, address: tuple[str, int] | str) -> bool:
    with socket.socket(family) as one:
        one.settimeout(10.0)
        return _works(lambda: one.connect(address))


def _opens() -> None:
    """A process that attaches to a segment also removes it at its end, which is harmless here."""
    SharedMemory(f"{_NAME}-posix").close()


def _is_leaver(command: Path) -> bool:
    """Whether the process is one of `leave`. The same id in two nodes is two processes."""
    try:
        return command.read_bytes().split(b"\0")[-3:-1] == [b"tests.nodes.traces", b"leave"]
    except OSError:  # it has ended
        return False


def find(address: str) -> dict[str, bool]:
    return {
        **{str(path): path.exists() for path in _FILES},
        "posix segment": _works(_opens),
        "system v segment": _libc.shmget(_KEY, 16, 0) >= 0,
        "socket": _connects(socket.AF_UNIX, f"/tmp/{_NAME}.socket"),
        "abstract socket": _connects(socket.AF_UNIX, f"\0{_NAME}"),
        "process": any(_is_leaver(path) for path in Path("/proc").glob("[0-9]*/cmdline")),
        "port": _connects(socket.AF_INET, (address, _PORT)),
    }


if __name__ == "__main__":
    if sys.argv[1] == "leave":
        leave()
    else:
        print(json.dumps(find(sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1")))
