"""The processes of all ranks but rank 0, below the one that is rank 0. No torch, so that they start before it has any.

All ranks share one anonymous piece of memory, which descriptors keep alive: nothing is left of it when they end. Each
has a socket to rank 0 as its stdin. It brings the launch record, and its end ends the rank. So does the end of rank 0's
process, also while the rank still imports torch.
"""

import atexit
import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from oscine.extensions.parallel.comm.memory_order import memory_order
from oscine.extensions.parallel.liveness import PeerWatchdog
from oscine.settings.config import EngineOptions
from oscine.system.python_child import COMPUTING, bound_command, child_environment
from oscine.types import RankLostError

RANK = "oscine.extensions.parallel.start.rank"  # the module of a rank's process
_LAST_WORDS_S = 1.0  # for a rank whose socket has ended to end itself


class Launch(msgspec.Struct, frozen=True):
    """First line, in JSON, on the stdin of a rank."""

    options: EngineOptions  # with the rank's own device
    rank: int
    num_ranks: int
    memory: int  # descriptor of what the ranks share
    store: int  # descriptor of a file in which their process groups find each other
    waker: int  # eventfd of the rank's end of the ring
    connection: int  # descriptor of one to rank 0, for transfers of pages
    num_threads: int | None  # of a CPU; None leaves it to torch
    parent: int  # process id


class Failed(msgspec.Struct, frozen=True):
    """Last line, in JSON, from a rank that failed."""

    message: str
    is_users: bool  # what a user can mend


class _Rank:
    """One process."""

    def __init__(self, rank: int, *shared: int) -> None:
        """`shared`: descriptors."""
        self.waker, (self.socket, theirs) = os.eventfd(0), socket.socketpair()
        self.connection, of_rank = Pipe()
        self.connection_there = of_rank.fileno()
        with theirs, of_rank:
            self._process = subprocess.Popen(
                bound_command(RANK),
                stdin=theirs.fileno(),
                stdout=2,  # what libraries print goes to stderr: stdout belongs to the parent's own output
                env=COMPUTING | child_environment(),
                pass_fds=(*shared, self.waker, self.connection_there),
            )
        self.socket.setblocking(False)
        self.pid, self.name = self._process.pid, f"rank {rank} (process {self._process.pid})"
        self._heard = b""
        self.serves = False

    def failure(self) -> Exception | None:
        """What it failed with, or RankLostError if it is gone."""
        with contextlib.suppress(BlockingIOError):
            while heard := self._receive():
                self._heard += heard
            return self._describe()
        return None

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(4096)
        except ConnectionResetError:
            return b""

    def _describe(self) -> Exception:
        if self._heard.endswith(b"\n"):
            failed = msgspec.json.decode(self._heard, type=Failed)
            is_users = failed.is_users and not self.serves
            return ValueError(failed.message) if is_users else RankLostError(f"{self.name}: {failed.message}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_LAST_WORDS_S)
            end = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            return RankLostError(f"{self.name} {end}")
        return RankLostError(f"{self.name} closed its socket")

    def end(self) -> None:
        """At once, also if it is stopped."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; it ends when it is let go
            self._process.wait(_LAST_WORDS_S)
        self.socket.close()
        self.connection.close()
        os.close(self.waker)


class RankProcesses:
    """Any thread may call."""

    def __init__(self, num_ranks: int) -> None:
        """Starts them. They import what they need, and wait for launch()."""
        memory_order()
        self.num_ranks = num_ranks
        self.memory, self.store = os.memfd_create("oscine"), os.memfd_create("oscine store")
        self._ranks = [_Rank(rank, self.memory, self.store) for rank in range(1, num_ranks)]
        atexit.register(self.close)
        self._sockets = select.epoll()
        for rank in self._ranks:
            self._sockets.register(rank.socket, select.EPOLLIN)
        self._failure: Exception | None = None
        self._finding = threading.Lock()
        self._awaited: dict[str, int] = {}  # process ids by name, of ranks that must not hang

    @property
    def wakers(self) -> list[int]:
        return [rank.waker for rank in self._ranks]

    @property
    def connections(self) -> list[Connection]:
        """To each of them, for transfers of pages."""
        return [rank.connection for rank in self._ranks]

    def launch(self, options: Sequence[EngineOptions], num_threads: int | None) -> None:
        """`options`: of all but rank 0. `num_threads`: as in Launch."""
        for number, (rank, own) in enumerate(zip(self._ranks, options, strict=True), 1):
            place = number, self.num_ranks, self.memory, self.store, rank.waker, rank.connection_there
            with contextlib.suppress(OSError):  # it has ended: see check()
                rank.socket.sendall(msgspec.json.encode(Launch(own, *place, num_threads, os.getpid())) + b"\n")

    def serve(self) -> None:
        """From now on a rank that is waited for and does nothing is a failure. Before, it may wait for files."""
        self._awaited = {rank.name: rank.pid for rank in self._ranks}
        for rank in self._ranks:
            rank.serves = True

    def fileno(self) -> int:
        """Can be read once a rank has failed or ended."""
        return self._sockets.fileno()

    def check(self) -> None:
        """Raises what a rank failed with, or RankLostError for one that has ended. Costs a microsecond."""
        if self._failure is None and self._sockets.poll(0):
            with self._finding:
                failures = [failure for rank in self._ranks if (failure := rank.failure()) is not None]
                self._failure = self._failure or next(iter(failures), None)
        if self._failure is not None:
            raise self._failure

    def watch(self) -> Callable[[], None]:
        """Begins a wait for the ranks; see oscine.extensions.parallel.comm.host.Watch."""
        return PeerWatchdog(self.check, self._awaited).look

    def close(self) -> None:
        """Ends them, if they have not ended."""
        atexit.unregister(self.close)
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()
        if ranks:
            self._sockets.close()
            os.close(self.memory)
            os.close(self.store)
