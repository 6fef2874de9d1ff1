"""Pages that both ranks of an engine read by NIXL, as rank 0 says, from the ranks of another engine's process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="it encodes the messages between processes")

from oscine.extensions.disaggregation.kv_link import Transfer
from oscine.extensions.disaggregation.of_ranks import RankedTransfers, TransferFollower
from oscine.types import PageMoves
from tests.extensions.disaggregation.test_kv_transfer import (
    GROUPS,
    MOVES,
    PAGES,
    Rank,
    Source,
    empty_of,
    logical,
    of_rank,
)
from tests.waiting import wait_until


def nothing_fails() -> None:
    pass


@dataclass
class Pair:
    """Two ranks of one process, of which one follows."""

    ranks: list[Rank]
    transfers: RankedTransfers

    def connect(self, source: Source) -> Any:
        return self.transfers.connect(source.endpoint.model, source.endpoint.groups, source.endpoint.ranks)


def follow(rank: Rank, connection: Connection) -> None:
    with suppress(EOFError):
        TransferFollower(rank.transfer, connection).run()


@contextmanager
def two_ranks(num_pages: int = PAGES) -> Iterator[Pair]:
    ranks = [Rank(2, number, filled=False, num_pages=num_pages) for number in range(2)]
    ours, theirs = Pipe()
    thread = threading.Thread(target=follow, args=(ranks[1], theirs))
    thread.start()
    yield Pair(ranks, RankedTransfers(ranks[0].transfer, [ours], nothing_fails))
    ours.close()
    thread.join()
    for rank in ranks:
        rank.transfer.close()


def ended(transfer: Transfer) -> Transfer:
    wait_until(lambda: transfer.state != "running", "the end of a transfer")
    return transfer


def check_moved(pair: Pair) -> None:
    for number, rank in enumerate(pair.ranks):
        for (group, source_pages, target_pages), found in zip(MOVES, rank.memory, strict=True):
            expected = np.full_like(found, empty_of(found))
            expected[target_pages] = of_rank(logical(GROUPS[group]), 2, number)[source_pages]
            assert (found == expected).all()


@pytest.mark.parametrize("there", [1, 2])
def test_each_rank_has_its_heads_of_the_pages(there: int) -> None:
    source = Source(there)
    with two_ranks() as pair:
        transfer = ended(pair.transfers.start(pair.connect(source), MOVES))
        assert (transfer.state, transfer.error) == ("done", None)
        assert transfer.num_bytes == sum(GROUPS[move.group].page_bytes * len(move.source_pages) for move in MOVES)
        check_moved(pair)
    source.kill()


@pytest.mark.long
def test_an_engine_on_several_ranks_can_be_read_from() -> None:
    with two_ranks() as there, two_ranks() as here:
        for rank, group_pages in ((rank, i) for rank in range(2) for i in range(len(GROUPS))):
            there.ranks[rank].memory[group_pages][:] = of_rank(logical(GROUPS[group_pages]), 2, rank)
        there.transfers.attend(True)
        peer = here.transfers.connect("m", there.transfers.groups, there.transfers.memories)
        assert ended(here.transfers.start(peer, MOVES)).state == "done"
        check_moved(here)
        there.transfers.attend(False)


def test_a_peer_that_dies_fails_its_transfers_and_a_new_one_is_read_from() -> None:
    doomed, source = Source(2), Source(2)
    with two_ranks() as pair:
        peer = pair.connect(doomed)
        assert ended(pair.transfers.start(peer, MOVES)).state == "done"
        doomed.kill()
        failed = ended(pair.transfers.start(peer, MOVES))
        assert failed.state == "failed"
        assert failed.error
        pair.transfers.disconnect(peer)
        assert ended(pair.transfers.start(pair.connect(source), MOVES)).state == "done"
    source.kill()


def test_a_transfer_that_fails_on_one_rank_ends_on_all_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    many, source = 4000, Source(2, num_pages=4000)
    with two_ranks(many) as pair:

        def refuse(*_: object) -> None:
            raise RuntimeError("no way to the other engine")

        monkeypatch.setattr(pair.ranks[1].transfer._agent, "add_remote_agent", refuse)
        everything = [PageMoves(0, list(range(many)), list(range(many)))]
        peer = pair.connect(source)
        failed = ended(pair.transfers.start(peer, everything))
        assert (failed.state, failed.error) == ("failed", "rank 1: RuntimeError: no way to the other engine")
        monkeypatch.undo()
        pair.transfers.disconnect(peer)  # from now on it is connected anew
        assert ended(pair.transfers.start(peer, MOVES)).state == "done"
    source.kill()


def test_a_cancelled_transfer_has_ended_on_all_ranks() -> None:
    many = 4000
    source = Source(2, num_pages=many)
    with two_ranks(many) as pair:
        transfer = pair.transfers.start(pair.connect(source), [PageMoves(0, list(range(many)), list(range(many)))])
        transfer.cancel()
        ended(transfer)
        assert (transfer.state, transfer.error) == ("failed", "the transfer was cancelled")
        before = [rank.memory[0].copy() for rank in pair.ranks]
        time.sleep(0.05)
        assert all((rank.memory[0] == then).all() for rank, then in zip(pair.ranks, before, strict=True))
    source.kill()


@pytest.mark.long
def test_a_rank_that_fails_before_it_has_told_its_memory_is_an_error() -> None:
    rank = Rank(2, 0, filled=False)
    ours, _theirs = Pipe()

    def fail() -> None:
        raise ValueError("rank 1: no NIXL")

    with pytest.raises(ValueError, match="rank 1: no NIXL"):
        RankedTransfers(rank.transfer, [ours], fail)
    rank.transfer.close()
