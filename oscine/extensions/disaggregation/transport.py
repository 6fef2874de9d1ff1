"""What carries pages between two engines: memory of one machine, RDMA, or TCP.

UCX, below NIXL, chooses by itself and does not tell. What it can use follows from the machines: RDMA needs an active
port of an InfiniBand or RoCE card on both, and memory is reached only by processes that share a kernel and its
namespaces.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from oscine.types import Transport

Way = Literal["memory", "rdma", "tcp"]
# Of UCX. By default a message of TCP has 8 KB; with 128 KB a transfer is two to three times as fast (docs/log.md). A
# process that receives more than its own limit ends, so both sides must have the same.
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "128k", "UCX_TCP_RX_SEG_SIZE": "128k"}
# A machine that is lost closes no connection: after 2 s of silence the kernel asks three times, once per second.
KEEPALIVE = {"UCX_TCP_KEEPIDLE": "2s", "UCX_TCP_KEEPCNT": "3", "UCX_TCP_KEEPINTVL": "1s"}
_NAMESPACES = ("pid", "ipc", "net")
_RDMA = ("all", "ib", "rc", "ud", "dc")  # beginnings of transports in UCX_TLS that use such cards


def own_transport(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Transport:
    """Of this process."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(root / "proc/self/ns" / name) for name in _NAMESPACES]
    except OSError:  # not Linux, or no /proc
        boot, spaces = "", []
    segments = " ".join(environment.get(name, value) for name, value in SEGMENTS.items())
    return Transport(" ".join((boot, *spaces)), segments, _has_rdma(environment.get("UCX_TLS", "all"), root))


def _has_rdma(allowed: str, root: Path) -> bool:
    names = allowed.lower().split(",")
    if allowed.startswith("^") or not any(name.startswith(_RDMA) for name in names):
        return False
    states = root.glob("sys/class/infiniband/*/ports/*/state")
    return any("ACTIVE" in state.read_text() for state in states)


def check_transport(ours: Transport, theirs: Transport) -> None:
    """Raises ValueError if a transfer between them would end a process."""
    if ours.segments != theirs.segments:
        there, here = (one.segments or "unknown" for one in (theirs, ours))
        raise ValueError(f"UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE differ: {there} there, {here} here")


def way(ours: Transport, theirs: Transport) -> Way:
    if ours.host == theirs.host and ours.host.strip():
        return "memory"
    return "rdma" if ours.has_rdma and theirs.has_rdma else "tcp"
