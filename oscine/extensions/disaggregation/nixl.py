"""Moves pages of KV memory from other engines' processes into this one's, by NIXL; imported only where that is wanted.

Knows memory, groups and NIXL; nothing of requests and permissions. One thread makes all calls of NIXL, which then needs
no locks of its own. Within one machine, a read that is posted copies its bytes before the call returns, with Python's
lock released. Over networks without RDMA, bytes only move while both sides make calls. The engine's thread never waits:
it starts a transfer and looks at its state.
"""

import contextlib
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oscine.extensions.disaggregation.copies import Copy, copies
from oscine.extensions.disaggregation.transport import KEEPALIVE, SEGMENTS, own_transport
from oscine.kv_group import KVGroup
from oscine.types import PageMoves, RankMemory, TransferState

# Bytes that are posted at once. A cancelled transfer still moves them: 10 ms on the host, 1 ms between GPUs.
_BATCH_BYTES = {"DRAM": 32 << 20, "VRAM": 256 << 20}
_POSTED_BATCHES = 2  # of one transfer: the next is on its way while one ends
_ACTIVE_S = 0.0001  # between looks while something moves
_ATTENTIVE_S = 0.0005  # while other engines may read from here
# How NIXL and UCX are set unless the operator says otherwise. UCX finds the best transport between two processes by
# itself: cross-memory copies of the kernel (cma) within a machine, RDMA with such cards, else TCP.
_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",  # a peer that dies is an ordinary event, which its readers report
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # else memory that was registered once may be kept for ever
    # Without NVLink UCX would read a GPU's memory through the host: 0.5 GB/s within an H200, against 50 to 80.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    **SEGMENTS,
    **KEEPALIVE,
}

_LOCAL = {"UCX_NET_DEVICES": "lo"}

Descriptors = NDArray[np.uint64]  # [N, 3]: address, bytes, device


@dataclass(slots=True)
class Peer:
    """An engine whose pages can be read."""

    groups: list[KVGroup]
    ranks: list[RankMemory]
    pieces: list[list[Copy]]  # per group: what brings a page here
    agents: dict[int, str] = field(default_factory=dict)  # rank -> NIXL's name, once it is known there


@dataclass(slots=True)
class _Batch:
    rank: int  # of the source
    source: Descriptors
    target: Descriptors


class NixlTransfer:
    """Pages on their way to one rank."""

    def __init__(self, peer: Peer, batches: list[_Batch], kind: str) -> None:
        """`kind`: of the target's memory."""
        self.state: TransferState = "running"
        self.error: str | None = None
        self.num_bytes = 0
        self.seconds = 0.0  # once it has ended
        self._begun_s = time.monotonic()
        self._peer, self._batches, self._kind = peer, deque(batches), kind
        self._posted: list[tuple[Any, int]] = []  # NIXL's handles, and bytes
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def advance(self, agent: Any) -> bool:
        """Polls the posted batches, and posts more. Returns whether the transfer has ended."""
        for posted in list(self._posted):
            self._attempt(self._look, agent, *posted)
        if self._cancelled:
            self._fail("the transfer was cancelled")
        while self._batches and len(self._posted) < _POSTED_BATCHES:
            batch = self._batches.popleft()
            self._attempt(self._post, agent, batch)
        if self._posted:
            return False
        self.seconds = time.monotonic() - self._begun_s
        self.state = "done" if self.error is None else "failed"
        return True

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # NIXL's have no common base
            self._fail(f"{type(error).__name__.removeprefix('nixl')}: {error}")

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self._batches.clear()

    def _post(self, agent: Any, batch: _Batch) -> None:
        memory, name = self._peer.ranks[batch.rank], self._agent_name(agent, batch.rank)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(batch.target, self._kind),
            agent.get_xfer_descs(batch.source, memory.kind),
            name,
        )
        self._posted.append((handle, int(batch.target[:, 1].sum())))
        agent.transfer(handle)

    def _look(self, agent: Any, handle: Any, num_bytes: int) -> None:
        status = None
        try:
            status = agent.check_xfer_state(handle)
        finally:
            if status != "PROC":
                self._posted.remove((handle, num_bytes))
                handle.release()
        if status == "DONE":
            self.num_bytes += num_bytes
        elif status != "PROC":
            self._fail("NIXL could not read the pages")

    def _agent_name(self, agent: Any, rank: int) -> str:
        agents = self._peer.agents
        if rank not in agents:
            agents[rank] = agent.add_remote_agent(self._peer.ranks[rank].agent)
        return agents[rank]


class KVTransfer:
    """One rank's pages, open to be read by other engines, and what reads theirs.

    Raises ValueError if NIXL is not installed or cannot read such memory.
    """

    def __init__(
        self,
        model: str,
        groups: Sequence[KVGroup],
        memory: RankMemory,
        rank: int = 0,
        owner: object = None,
        *,
        local: bool = False,
    ) -> None:
        """`model`: what makes equal tokens have equal keys and values.

        `memory` without an agent: regions that stay in place as long as `owner`, or this object, lives.

        `local`: only processes of this machine transfer pages; NIXL then listens on no network.
        """
        self._owner = owner
        self.model, self.groups, self._rank = model, list(groups), rank
        self._agent = _new_agent(local)
        self.transport = own_transport()
        self._register(memory)
        self._memory = replace(memory, agent=bytes(self._agent.get_agent_metadata()))
        self.memories = [self._memory]
        self._wake = threading.Condition()
        self._orders: list[Callable[[], None]] = []
        self._active: list[NixlTransfer] = []  # of the thread
        self._attentive = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def connect(self, model: str, groups: list[KVGroup], ranks: list[RankMemory]) -> Peer:
        if model != self.model:
            raise ValueError(f"pages differ in model: {model} there, {self.model} here")
        if len(groups) != len(self.groups):
            raise ValueError(f"pages differ in groups: {len(groups)} there, {len(self.groups)} here")
        pieces = [copies(theirs, ours, self._rank) for theirs, ours in zip(groups, self.groups, strict=True)]
        return Peer(groups, ranks, pieces)

    def disconnect(self, peer: Peer) -> None:
        self._order(lambda: self._forget(peer))

    def start(self, peer: Peer, moves: list[PageMoves]) -> NixlTransfer:
        batches = [batch for move in moves for batch in self._batches(peer, move)]
        transfer = NixlTransfer(peer, batches, self._memory.kind)
        self._order(lambda: self._active.append(transfer))
        return transfer

    def attend(self, attentive: bool) -> None:
        if attentive != self._attentive:
            self._attentive = attentive
            self._order(lambda: None)

    def close(self) -> None:
        """Nothing may be on its way."""
        self._closed = True
        self._order(lambda: None)
        self._thread.join()
        self._agent = None

    def num_bytes(self, moves: list[PageMoves]) -> int:
        """Bytes of these pages on this rank."""
        return sum(self.groups[move.group].page_bytes * len(move.target_pages) for move in moves)

    def _register(self, memory: RankMemory) -> None:
        ends: dict[int, int] = {}  # by the address of the start: groups that share memory have one region
        for region in memory.regions:
            ends[region.address] = max(ends.get(region.address, 0), region.num_pages * region.stride)
        regions = [(address, length, memory.device, "") for address, length in ends.items()]
        try:
            self._agent.register_memory(regions, memory.kind)
        except Exception as error:  # NIXL's have no common base
            raise ValueError(f"NIXL cannot transfer {memory.kind} of this machine: {error}") from None

    def _batches(self, peer: Peer, move: PageMoves) -> list[_Batch]:
        """For each rank of the source, its pieces of the pages, page by page, in batches of limited size."""
        found: list[_Batch] = []
        for rank, memory in enumerate(peer.ranks):
            pieces_K3 = np.array([piece[1:] for piece in peer.pieces[move.group] if piece[0] == rank], np.uint64)
            if not len(pieces_K3):
                continue
            source_K, target_K, length_K = pieces_K3.T
            source = _descriptors(memory, move.group, move.source_pages, source_K, length_K)
            target = _descriptors(self._memory, move.group, move.target_pages, target_K, length_K)
            size = max(1, _BATCH_BYTES[self._memory.kind] // int(length_K.sum())) * len(pieces_K3)
            found += [
                _Batch(rank, *_joined(source[i : i + size], target[i : i + size])) for i in range(0, len(source), size)
            ]
        return found

    # ---- the thread ----

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def _run(self) -> None:
        while not self._closed:
            with self._wake:
                while not (self._orders or self._active or self._attentive):
                    self._wake.wait()
                orders, self._orders = self._orders, []
            for order in orders:
                order()
            self._active = [transfer for transfer in self._active if not transfer.advance(self._agent)]
            if self._attentive:
                with contextlib.suppress(Exception):  # as below: an engine that reads from here has its own errors
                    self._agent.get_new_notifs()
            time.sleep(_ACTIVE_S if self._active else _ATTENTIVE_S)

    def _forget(self, peer: Peer) -> None:
        for name in peer.agents.values():
            with contextlib.suppress(Exception):  # NIXL's have no common base; this thread must go on for other peers
                self._agent.remove_remote_agent(name)
        peer.agents.clear()


def _descriptors(
    memory: RankMemory,
    group: int,
    pages: list[int],
    offsets_K: NDArray[np.uint64],
    lengths_K: NDArray[np.uint64],
) -> Descriptors:
    """[pages x K, 3]; offsets in a page."""
    region = memory.regions[group]
    pages_P = np.uint64(region.address) + np.array(pages, np.uint64) * np.uint64(region.stride)
    found_PK3 = np.empty((len(pages_P), len(offsets_K), 3), np.uint64)
    found_PK3[:, :, 0] = pages_P[:, None] + offsets_K
    found_PK3[:, :, 1] = lengths_K
    found_PK3[:, :, 2] = memory.device
    return found_PK3.reshape(-1, 3)


def _joined(source: Descriptors, target: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Merges pages that are contiguous on both sides into one descriptor, since each descriptor is one copy."""
    order = np.argsort(source[:, 0])
    source, target = source[order], target[order]
    follows = [found[:-1, 0] + found[:-1, 1] == found[1:, 0] for found in (source, target)]
    first = np.flatnonzero(np.concatenate(([True], ~(follows[0] & follows[1]))))
    joined = source[first], target[first]
    for found in joined:
        found[:, 1] = np.add.reduceat(source[:, 1], first)
    return joined


def _new_agent(local: bool) -> Any:
    for name, value in (_ENVIRONMENT | (_LOCAL if local else {})).items():
        os.environ.setdefault(name, value)
    try:
        from nixl_cu13 import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ValueError(f"KV transfer needs NIXL: install oscine[cluster] ({error})") from None
    try:
        # Without NIXL's own thread, which never sleeps: it would take a core.
        return nixl_agent(uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False))
    except Exception as error:  # NIXL's have no common base
        raise ValueError(f"NIXL cannot start: {error}") from None
