"""A Ray cluster of this machine alone, which outlives the command that starts it and ends with all that it started.

It has no dashboard, no fixed ports and no usage statistics. It has a temporary folder of its own, and a token that its
clients must show. So it meets no other Ray. Ray itself is imported late, because it reads the token on import.

    oscine-ray-XXXXXXXX/  0700: other users of this machine can enter nothing below
        lock              the mark of a folder that Oscine made; held by the process that all others belong to
        token             0600
        address, start.log
        ray/              Ray's own: sockets, logs, sessions. Ray makes this folder accessible to all users
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oscine.extensions.replicas.spec.fit import Machine
from oscine.system.owned_folder import MARK, Kind, make_temporary, remove_left
from oscine.system.python_child import CHECKOUT, child_environment, module_command

_START_S = 60.0
_STOP_S = 15.0  # for processes to end by themselves
_POLL_S = 0.05
_OBJECT_STORE_BYTES = 80 << 20  # nothing large goes through it: tokens and pages have ways of their own
_ADDRESS, _LOG, _TOKEN, _RAY = "address", "start.log", "token", "ray"  # in the folder
_OTHER_RAY = "RAY_ADDRESS"  # environment variable: with it Ray would look for that one instead of starting
_KIND = Kind("ray", None)  # nothing in it is worth keeping


class ClusterError(Exception):
    """A cluster cannot be had, or not as it was asked for. One line."""


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time, of all that load, save or end what is noted at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class LocalRay:
    address: str  # of its GCS
    pid: int  # of the process that all others belong to
    folder: str  # temporary; with its token and its logs
    num_cpus: int

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "LocalRay | None":
        """None when there is none, or it died: what is left of it then is removed."""
        found = cls._read(path)
        if found is None or found.alive:
            return found
        found.end(path)
        return None

    @classmethod
    def _read(cls, path: Path) -> "LocalRay | None":
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def end(self, path: Path) -> None:
        """Stops it, and removes the note of it; that of another one stays."""
        self.stop()
        if self._read(path) == self:
            path.unlink()

    @property
    def alive(self) -> bool:
        """The process holds a lock as long as it lives; its pid alone may belong to another process by now."""
        try:
            with Path(self.folder, MARK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def stop(self) -> None:
        """Ends every process of it, and removes the folder."""
        for number, wait_s in ((signal.SIGTERM, 2 * _STOP_S), (signal.SIGKILL, _STOP_S)):
            deadline = time.monotonic() + wait_s
            if self.alive:
                os.kill(self.pid, number)
            while self.alive and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            remove_left(_KIND, Path(self.folder))

    def connect(self) -> None:
        """Makes this process its client; it cannot be one of another cluster afterwards."""
        os.environ.update(_environment(self.folder))
        connect(self.address)


def connect(address: str) -> None:
    """Makes this process a client of a Ray cluster. Raises ClusterError when it is not there."""
    import ray

    try:
        with contextlib.chdir(CHECKOUT or "/"):  # Ray's workers look for modules in this folder first
            ray.init(address=address, namespace="oscine", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from None


def num_gpus() -> float:
    """Of the cluster that this process is a client of."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def machines(*, free: bool = False) -> list[Machine]:
    """Of the cluster that this process is a client of. `free`: only what no actor has."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    resources = {node["NodeID"]: node["Resources"] for node in nodes}
    if free:
        from ray._private.state import available_resources_per_node  # no public one; with Ray 2.60 it works

        left = available_resources_per_node()  # type: ignore[no-untyped-call]
        resources = {name: left.get(name, {}) for name in resources}
    return [Machine(node["NodeManagerAddress"], resources[node["NodeID"]], node.get("Labels", {})) for node in nodes]


def disconnect() -> None:
    import ray

    ray.shutdown()


def start(num_cpus: int, num_gpus: int | None = None) -> LocalRay:
    """Raises ClusterError when Ray does not start. `num_gpus`: None for those that Ray finds."""
    try:
        owned = make_temporary(_KIND, needs_lock=True)  # mode 0700
    except OSError as error:
        raise ClusterError(str(error)) from None
    folder = owned.path
    (folder / _TOKEN).touch(0o600, exist_ok=False)
    (folder / _TOKEN).write_text(secrets.token_hex(32))
    request = json.dumps({"folder": str(folder), "lock": owned.lock, "num_cpus": num_cpus, "num_gpus": num_gpus})
    log, address = folder / _LOG, folder / _ADDRESS
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*module_command(__name__), request],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a ctrl-C of the terminal is not meant for it
            env={name: value for name, value in child_environment().items() if name != _OTHER_RAY}
            | _environment(str(folder)),
            pass_fds=[owned.lock],
        )
    owned.close()  # now it is the child's
    started = LocalRay("", process.pid, str(folder), num_cpus)
    try:
        _wait_for(address, process)
        require_private(folder)
    except BaseException as error:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        started.stop()
        if not isinstance(error, TimeoutError):
            raise
        raise ClusterError(f"Ray does not start: {said[-1] if said else 'it says nothing'}") from None
    return replace(started, address=address.read_text())


def _wait_for(address: Path, process: "subprocess.Popen[bytes]") -> None:
    """Raises TimeoutError when there will be none."""
    deadline = time.monotonic() + _START_S
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)


def require_private(folder: Path) -> None:
    """Raises ClusterError if other users can read the token or enter Ray's folder: Ray changes modes."""
    for path in (folder, folder / _TOKEN):
        found = path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            mode = stat.filemode(found.st_mode)
            raise ClusterError(f"{path} is open to other users ({mode}), so Ray was ended: they could run code in it")


def _environment(folder: str) -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Path(folder, _TOKEN)),
        # Despite its name for every system: the node gets the address 127.0.0.1, not one of a network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def _run(folder: str, lock: int, num_cpus: int, num_gpus: int | None) -> None:
    """In the process that all others belong to: until SIGTERM. Holds the lock."""
    import psutil  # Ray brings its own
    import ray

    os.set_inheritable(lock, False)
    signals = {signal.SIGTERM, signal.SIGINT}
    ray.init(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(Path(folder, _RAY)),
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    unfinished = Path(folder, _ADDRESS + ".new")  # the file appears whole: no reader sees half an address
    unfinished.write_text(str(ray.get_runtime_context().gcs_address))
    unfinished.rename(Path(folder, _ADDRESS))
    signal.sigwait(signals)
    below = psutil.Process().children(recursive=True)  # engines too: they end when their owner has
    ray.shutdown()
    _, left = psutil.wait_procs(below, timeout=_STOP_S)
    for process in left:
        process.kill()


if __name__ == "__main__":
    _run(**json.loads(sys.argv[1]))
