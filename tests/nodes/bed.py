"""Several nodes on one machine: each has its own network, processes, shared memory, host name and writable files.

    outer namespaces, where the tests run: 10.77.0.254
        switch (bridge) --- veth ------------------ eth0 of node 1: 10.77.0.1
                        --- veth ------------------ eth0 of node 2: 10.77.0.2
                        --- TAP [relay] TAP ------- eth0 of node 3: 10.77.0.3, with delay, loss and a rate
        other (bridge): where the nodes of a partition are

All nodes read the same files outside of temporary folders, as nodes with the same image do, and can change none.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.nodes.entered import INSIDE, ROOT, TEMPORARY
from tests.waiting import DEADLINE_S, wait_until

CLIENT = "10.77.0.254"  # address of the tests themselves
_SWITCH, _OTHER = "switch", "other"
_ADDRESS = "02:00:00:00:77:fe"  # of the switch, as a network device
# Ends with its standard input. As process 1 of a node it also waits for orphans.
_INIT = """
set -e
hostname {name}
for folder in {temporary}; do mount -t tmpfs tmpfs $folder; done
mount -o remount,bind,ro /
mkdir /tmp/home
printf '%s\\n' {hosts} >/tmp/hosts
mount --bind /tmp/hosts /etc/hosts
ip link set lo up
echo ready
while read -r line; do :; done
"""


@dataclass(frozen=True)
class Link:
    """What happens to packets between a node and the switch, in each direction."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of packets
    bytes_s: float = 0.0  # 0: no bound


class Node:
    """One node. It lives from its construction to kill()."""

    def __init__(self, number: int, hosts: list[str], link: Link | None) -> None:
        self.name, self.address = f"node{number}", f"10.77.0.{number}"
        self._port = f"port{number}"  # its device at the switch
        self._relay: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        script = _INIT.format(name=self.name, temporary=" ".join(TEMPORARY), hosts=" ".join(map(shlex.quote, hosts)))
        self._unshare = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", script),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n", f"{self.name} does not start"
        [self._init] = psutil.Process(self._unshare.pid).children()
        self._plug(link)

    def _plug(self, link: Link | None) -> None:
        if link is None:
            _ip(f"link add {self._port} type veth peer name eth0 netns {self._init.pid}")
        else:
            far = f"{self._port}far"
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "tests.nodes.relay", self._port, far],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._tell_relay(link)
            _ip(f"link set {far} netns {self._init.pid} name eth0")
        _ip(f"link set {self._port} master {_SWITCH} up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def _tell_relay(self, link: Link) -> None:
        assert self._relay is not None, f"{self.name} was made without a relay"
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(asdict(link)) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "ready\n", "the relay does not work"

    # ---- processes ----

    def _inside(self, argv: Iterable[str]) -> list[str]:
        """Without `cd` the current folder would be one of the outer mounts, which can be written to."""
        enter = ("nsenter", "--target", str(self._init.pid), "--mount", "--pid", "--ipc", "--uts", "--net", "--")
        return [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(ROOT), *argv]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "XDG_STATE_HOME": "/tmp/home/state"}
        left_out = {INSIDE, "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"}
        return {key: value for key, value in os.environ.items() if key not in left_out} | own | dict(more)

    def popen(self, *argv: str, env: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
        """A process of this node, which ends with it at the latest."""
        options = {"text": True, "stdin": subprocess.DEVNULL} | options
        process = subprocess.Popen(self._inside(argv), env=self._environment(env or {}), **options)
        self._processes.append(process)
        return process

    def run(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        stdin: Any = subprocess.DEVNULL,
    ) -> str:
        """What it writes to standard output. Raises AssertionError with all that it wrote if it fails."""
        done = subprocess.run(
            self._inside(argv),
            env=self._environment(env or {}),
            capture_output=True,
            text=True,
            stdin=stdin,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{self.name}: {shlex.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def python(self, *argv: str, **options: Any) -> str:
        return self.run(sys.executable, *argv, **options)

    def processes(self) -> list[psutil.Process]:
        """All but process 1. Their ids are those of the outer namespace."""
        own = _namespace(self._init)
        return [process for process in psutil.process_iter() if _namespace(process) == own and process != self._init]

    def files(self, path: str) -> Path:
        """A path of the node, for a look from outside."""
        return Path(f"/proc/{self._init.pid}/root{path}")

    # ---- the network ----

    def received_bytes(self) -> int:
        """All bytes that have come to this node's device, with the headers of their packets."""
        [device] = json.loads(self.run("ip", "-json", "-statistics", "link", "show", "dev", "eth0"))
        return int(device["stats64"]["rx"]["bytes"])

    def set_link(self, link: Link) -> None:
        """Of a node that was made with one."""
        self._tell_relay(link)

    def unplug(self) -> None:
        """Its network is gone without a word: nothing closes a connection."""
        _ip(f"link set {self._port} down")

    def plug_in(self) -> None:
        _ip(f"link set {self._port} up")

    def move(self, switch: str) -> None:
        _ip(f"link set {self._port} master {switch}")

    # ---- the end ----

    def kill(self) -> None:
        """kill -9 of the node: of all its processes at once, after its network."""
        if self._init.is_running():
            self.unplug()
            self._init.kill()
        self._unshare.wait(DEADLINE_S)
        for process in self._processes:
            process.wait(DEADLINE_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for pipe in (self._unshare, self._relay):
            if pipe is not None:
                pipe.kill()
                pipe.wait()
                assert pipe.stdin is not None
                assert pipe.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.stdin.close()
                pipe.stdout.close()
        self._relay = None
        with contextlib.suppress(subprocess.CalledProcessError):  # a device may end with its namespace
            _ip(f"link delete {self._port}", quiet=True)


class Bed:
    """Context manager: `count` nodes on one switch. `links`: of the nodes, by number, that are behind a relay."""

    def __init__(self, count: int, links: Mapping[int, Link] | None = None) -> None:
        self._count, self._links = count, dict(links or {})
        self.nodes: list[Node] = []
        self._hosts = ["127.0.0.1 localhost", *(f"10.77.0.{n} node{n}" for n in range(1, count + 2))]

    def __enter__(self) -> "Bed":
        # With an address of its own, as a bridge else has that of a port, and another one when this port leaves.
        _ip(f"link add {_SWITCH} address {_ADDRESS} type bridge")
        _ip(f"link add {_OTHER} type bridge")
        _ip(f"address add {CLIENT}/24 dev {_SWITCH}")
        _ip(f"link set {_SWITCH} up")
        _ip(f"link set {_OTHER} up")
        try:
            for _ in range(self._count):
                self.add()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for node in self.nodes:
            node.kill()
        _ip(f"link delete {_SWITCH}")
        _ip(f"link delete {_OTHER}")

    def add(self) -> Node:
        """One more node."""
        number = len(self.nodes) + 1
        node = Node(number, self._hosts, self._links.get(number))
        self.nodes.append(node)
        return node

    def partition(self, nodes: Iterable[Node]) -> None:
        """These nodes reach each other and no other ones, and the reverse. Connections are not closed."""
        for node in nodes:
            node.move(_OTHER)

    def heal(self) -> None:
        for node in self.nodes:
            if node._init.is_running():
                node.move(_SWITCH)


def _namespace(process: psutil.Process) -> str | None:
    """Of its process ids; None for a process that has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:
        return None


def _ip(arguments: str, *, quiet: bool = False) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, stderr=subprocess.DEVNULL if quiet else None)


def settled(processes: list[psutil.Process]) -> None:
    """Waits for the end of these processes."""
    wait_until(lambda: not any(process.is_running() for process in processes), "the end of a node's processes")
