"""The process of a rank other than 0: `python -m oscine.extensions.parallel.start.rank`, with a Launch record on stdin.

The process lives as long as its stdin is open, which is a socket to rank 0, and no longer than rank 0 itself
(bound_command). It starts as rank 0 does, and then follows its plans.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import torch

from oscine.executor.runner import TorchExecutor
from oscine.executor.start.load import load_executor
from oscine.executor.start.parts import FOLLOWER
from oscine.executor.start.stopwatch import Stopwatch
from oscine.extensions.parallel.comm.host import HostCommunicator
from oscine.extensions.parallel.liveness import PeerWatchdog, is_stopped
from oscine.extensions.parallel.processes import Failed, Launch
from oscine.extensions.parallel.ranked import follow
from oscine.extensions.parallel.ring import RingReader
from oscine.extensions.parallel.rules import ReceivedRules
from oscine.extensions.parallel.shared import SharedMemory
from oscine.extensions.parallel.start.communicator import between_ranks
from oscine.system.extensions import part

_STDIN = 0
_FAILED = 3


class _Rank:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._awaited: dict[str, int] = {}  # process ids by name, of ranks that must not hang
        shared = SharedMemory(launch.memory, launch.num_ranks)
        self._host = HostCommunicator(launch.rank, launch.num_ranks, shared.slots, self._watch)
        self._ring = RingReader(shared.ring, launch.rank - 1, launch.waker, self._watch_idle)

    def run(self) -> None:
        launch, ring = self._launch, self._ring
        if launch.num_threads is not None:
            torch.set_num_threads(launch.num_threads)
        executor = load_executor(
            launch.options,
            lambda text: None,
            Stopwatch(),
            between_ranks(self._host, launch.store, launch.options),
            lambda tokenizer, vocab_size, at_once: lambda num_slots, device: ReceivedRules(ring, device),
        ).executor
        if launch.options.peers.kv_transfer:
            _follow_transfers(launch, executor)
        self._awaited = {"rank 0": launch.parent}
        follow(executor, ring)

    def _watch(self) -> Callable[[], None]:
        """For results of rank 0."""
        return PeerWatchdog(lambda: None, self._awaited).look

    def _watch_idle(self) -> Callable[[], None]:
        """For plans of rank 0, which may have none for a long time."""
        return PeerWatchdog(lambda: None, self._awaited, at_work=False).look


def _follow_transfers(launch: Launch, executor: TorchExecutor) -> None:
    """In a thread of their own."""
    follower = part(FOLLOWER)(launch.options, executor, Connection(launch.connection))

    def run() -> None:
        try:
            follower.run()
        except (EOFError, OSError):  # rank 0 has ended
            pass
        except Exception as error:
            _tell(error)

    threading.Thread(target=run, name="transfers", daemon=True).start()


def _end_with_stdin() -> None:
    def listen() -> None:
        while os.read(_STDIN, 4096):
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()


def _tell(error: Exception) -> None:
    """Rank 0, for its own error."""
    is_users = isinstance(error, ValueError | OSError)
    message = str(error) if is_users else f"{type(error).__name__}: {error}"
    os.write(_STDIN, msgspec.json.encode(Failed(message, is_users)) + b"\n")


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    launch = msgspec.json.decode(line, type=Launch)
    _end_with_stdin()
    try:
        _Rank(launch).run()
    except Exception as error:
        traceback.print_exc()
        if is_stopped(launch.parent):  # it cannot hear that it should end, and its requests would wait
            os.kill(launch.parent, signal.SIGKILL)
        _tell(error)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
