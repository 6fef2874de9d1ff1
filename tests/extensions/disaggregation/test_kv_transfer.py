"""Pages read by NIXL from another process, into memory that only the tests read."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="it encodes the messages between processes")

from oscine.engine.wire.endpoint import KVEndpoint
from oscine.extensions.disaggregation import nixl as nixl_transfer
from oscine.extensions.disaggregation.nixl import KVTransfer, NixlTransfer
from oscine.kv_dtype import KVDtype
from oscine.kv_group import KVGroup
from oscine.types import PageMoves, RankMemory, Region
from tests.waiting import wait_until

FULL = KVGroup(None, (1, 3, 5), 8, 16, 8, "float32")
GROUPS = (
    FULL,
    replace(FULL, window=24, layers=(2, 4)),
    replace(FULL, window=5, layers=(0,)),
    replace(FULL, dtype=KVDtype.FP8),
)
PAGES = 12


def logical(group: KVGroup, num_pages: int = PAGES) -> np.ndarray:
    """Every element different: [pages, layers, 2, heads, page size, head dim]."""
    shape = (num_pages, *group.page_shape)
    if group.dtype == KVDtype.FP8:
        return np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    start = GROUPS.index(group) / 4
    return (np.arange(np.prod(shape), dtype=np.float32) + np.float32(start)).reshape(shape)


def of_rank(pages: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(pages, num_ranks, axis=3)[rank])


def empty_of(pages: np.ndarray) -> int:
    """What no filled page holds."""
    return 255 if pages.dtype == np.uint8 else -1


class Rank:
    """One rank's memory, and its transfer."""

    def __init__(self, num_ranks: int, rank: int, *, filled: bool, num_pages: int = PAGES) -> None:
        self.memory = [of_rank(logical(group, num_pages), num_ranks, rank) for group in GROUPS]
        if not filled:
            for pages in self.memory:
                pages.fill(empty_of(pages))
        regions = [Region(pages.ctypes.data, num_pages, pages.strides[0]) for pages in self.memory]
        groups = [replace(group, num_ranks=num_ranks) for group in GROUPS]
        self.transfer = KVTransfer("m", groups, RankMemory(b"", "DRAM", 0, regions), rank)

    def connect(self, endpoint: KVEndpoint) -> Any:
        return self.transfer.connect(endpoint.model, endpoint.groups, endpoint.ranks)


def serve(pipe: Connection, num_ranks: int, num_pages: int) -> None:
    ranks = [Rank(num_ranks, rank, filled=True, num_pages=num_pages) for rank in range(num_ranks)]
    for rank in ranks:
        rank.transfer.attend(True)
    pipe.send(
        KVEndpoint("m", ranks[0].transfer.groups, [memory for rank in ranks for memory in rank.transfer.memories])
    )
    pipe.recv()


class Source:
    """A process with filled pages."""

    def __init__(self, num_ranks: int = 1, num_pages: int = PAGES) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: Any = context.Process(target=serve, args=(theirs, num_ranks, num_pages), daemon=True)
        self.process.start()
        self.endpoint: KVEndpoint = self._pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[int, Source]]:
    found = {num_ranks: Source(num_ranks) for num_ranks in (1, 2)}
    yield found
    for source in found.values():
        source.kill()


def wait(transfer: NixlTransfer) -> NixlTransfer:
    wait_until(lambda: transfer.state != "running", "the end of the transfer")
    return transfer


MOVES = [
    PageMoves(0, [3, 0, 7, 8, 9, 4, 5, 10], [1, 2, 11, 5, 6, 7, 9, 10]),
    PageMoves(1, [5], [0]),
    PageMoves(2, [4, 9], [9, 3]),
    PageMoves(3, [0, 8], [2, 7]),
]


@pytest.mark.parametrize("here", [1, 2, 4])
@pytest.mark.parametrize("there", [1, 2])
def test_pages_arrive_where_they_should_and_nowhere_else(here: int, there: int, sources: dict[int, Source]) -> None:
    for number in range(here):
        rank = Rank(here, number, filled=False)
        transfer = wait(rank.transfer.start(rank.connect(sources[there].endpoint), MOVES))
        assert (transfer.state, transfer.error) == ("done", None)
        num_bytes = sum(GROUPS[move.group].page_bytes * len(move.source_pages) for move in MOVES) // here
        assert transfer.num_bytes == rank.transfer.num_bytes(MOVES) == num_bytes
        for (group, source_pages, target_pages), found in zip(MOVES, rank.memory, strict=True):
            expected = np.full_like(found, empty_of(found))
            expected[target_pages] = of_rank(logical(GROUPS[group]), here, number)[source_pages]
            assert (found == expected).all()
        rank.transfer.close()


def test_a_peer_that_dies_fails_its_transfers_and_nobody_elses(sources: dict[int, Source]) -> None:
    rank, doomed = Rank(1, 0, filled=False), Source()
    peer = rank.connect(doomed.endpoint)
    assert wait(rank.transfer.start(peer, MOVES)).state == "done"
    doomed.kill()
    failed = wait(rank.transfer.start(peer, MOVES))
    assert failed.state == "failed"
    assert failed.error
    rank.transfer.disconnect(peer)
    assert wait(rank.transfer.start(rank.connect(sources[1].endpoint), MOVES)).state == "done"
    rank.transfer.close()


def test_pages_still_move_after_nixl_could_not_forget_a_peer(
    sources: dict[int, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(1, 0, filled=False)
    peer = rank.connect(sources[1].endpoint)
    assert wait(rank.transfer.start(peer, MOVES)).state == "done"

    def refuse(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(rank.transfer._agent, "remove_remote_agent", refuse)
    rank.transfer.disconnect(peer)
    assert wait(rank.transfer.start(rank.connect(sources[2].endpoint), MOVES)).state == "done"
    rank.transfer.close()


def test_a_cancelled_transfer_ends_before_all_is_moved() -> None:
    many = 4000
    source, rank = Source(num_pages=many), Rank(1, 0, filled=False, num_pages=many)
    everything = [PageMoves(0, list(range(many)), list(range(many)))]
    transfer = rank.transfer.start(rank.connect(source.endpoint), everything)
    transfer.cancel()
    wait(transfer)
    assert (transfer.state, transfer.error) == ("failed", "the transfer was cancelled")
    assert transfer.num_bytes < rank.transfer.num_bytes(everything)
    rank.transfer.close()
    source.kill()


def test_other_pages_are_refused_before_anything_moves(sources: dict[int, Source]) -> None:
    rank, endpoint = Rank(1, 0, filled=False), sources[1].endpoint
    first, *others = endpoint.groups
    with pytest.raises(ValueError, match="page size: 32 there, 16 here"):
        rank.transfer.connect("m", [first, replace(others[0], page_size=32), *others[1:]], endpoint.ranks)
    with pytest.raises(ValueError, match="groups: 1 there, 4 here"):
        rank.transfer.connect("m", [first], endpoint.ranks)
    with pytest.raises(ValueError, match="model: n there, m here"):
        rank.transfer.connect("n", endpoint.groups, endpoint.ranks)
    rank.transfer.close()


def copied(source: np.ndarray, target: np.ndarray) -> dict[int, int]:
    """Byte of the target -> byte of the source."""
    return {
        int(to) + i: int(at) + i
        for (at, size, _), (to, same, _) in zip(source, target, strict=True)
        for i in range(size)
        if size == same
    }


def test_joined_pieces_copy_the_same_bytes() -> None:
    """Pieces of 4 bytes in any order, some of which follow each other on one side only, or on both."""
    random = np.random.default_rng(0)
    for _ in range(50):
        count = int(random.integers(1, 12))
        source, target = (np.full((count, 3), 4, np.uint64) for _ in range(2))
        source[:, 0] = 1000 + 4 * random.permutation(14)[:count]
        follows = random.random(count) < 0.6
        target[:, 0] = np.where(follows, source[:, 0] + np.uint64(5000), 9000 + 4 * random.permutation(count) * 3)
        joined = nixl_transfer._joined(source.copy(), target.copy())
        assert copied(*joined) == copied(source, target)
        assert len(copied(*joined)) == 4 * count
        assert len(joined[0]) <= count
    whole = source.copy()
    whole[:, 0] = 1000 + 4 * np.arange(count)[::-1]
    (found,), (_,) = nixl_transfer._joined(whole, whole + np.array([8, 0, 0], np.uint64))
    assert found.tolist() == [1000, 4 * count, 4]


def test_without_nixl_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['nixl_cu13'] = None\n"
        "from tests.extensions.disaggregation.test_kv_transfer import Rank\n"
        "try: Rank(1, 0, filled=False)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KV transfer needs NIXL: install oscine[cluster]" in done.stdout
