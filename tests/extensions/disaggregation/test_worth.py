"""The choice between fetching pages and computing their prompt, and what carries pages between two engines."""

from pathlib import Path

import pytest

from oscine.extensions.disaggregation.transport import check_transport, own_transport, way
from oscine.extensions.disaggregation.worth import Worth
from oscine.types import EngineStats, RemotePrefill, ScheduledSequence, StepPlan, Transport
from tests.extensions.disaggregation.engine_pair import ADDRESS, Pair
from tests.extensions.disaggregation.test_remote_prefill import SETTING, prompt

OTHER = "tcp://elsewhere"


def prompt_step(num_tokens: int) -> StepPlan:
    return StepPlan(0, [], [ScheduledSequence(0, 0, num_tokens, True, [])])


def known(bytes_s: float, tokens_s: float) -> Worth:
    worth = Worth()
    worth.note_step(prompt_step(1000), 1000 / tokens_s)
    worth.note_transfer(ADDRESS, 1000.0, 1)  # of the connection
    worth.note_transfer(ADDRESS, 1.0, round(bytes_s))
    return worth


@pytest.mark.parametrize(("bytes_s", "declines"), [(1e9, False), (30e6, False), (10e6, True)])
def test_pages_are_fetched_unless_their_transfer_takes_longer_than_their_tokens(bytes_s: float, declines: bool) -> None:
    """2,000 tokens with 40 MB: 2 s at 1,000 tokens/s. The link takes 0.04, 1.3 or 4 s."""
    assert known(bytes_s, 1000).declines(ADDRESS, 40_000_000, 2000) is declines


def test_before_both_rates_are_known_pages_are_fetched() -> None:
    worth = Worth()
    assert not worth.declines(ADDRESS, 1 << 40, 1)
    worth.note_late(ADDRESS, 1.0, 1)
    assert not worth.declines(ADDRESS, 1 << 40, 1)
    worth.note_step(prompt_step(1000), 1.0)
    assert worth.declines(ADDRESS, 1 << 40, 1)
    assert not worth.declines(OTHER, 1 << 40, 1), "another link"


def test_a_slow_link_is_tried_again_and_an_engine_that_ended_is_forgotten() -> None:
    worth = known(10e6, 1000)
    declined = 0
    while worth.declines(ADDRESS, 40_000_000, 2000):
        declined += 1
    assert 10 < declined < 20  # 0.95 ** 14 is a half
    worth.note_transfer(ADDRESS, 1.0, 1000)
    assert worth.declines(ADDRESS, 40_000_000, 2000)
    worth.forget(ADDRESS)
    assert not worth.declines(ADDRESS, 40_000_000, 2000)


def test_statistics_show_both_rates() -> None:
    stats = EngineStats()
    Worth().count(stats)
    assert (stats.fetch_bytes_per_s, stats.computed_prompt_tokens_per_s) == (0, 0)
    known(3e6, 500).count(stats)
    assert (stats.fetch_bytes_per_s, stats.computed_prompt_tokens_per_s) == (3_000_000, 500)


def slow(pair: Pair, name: str, first: int) -> RemotePrefill | None:
    pair.add(name, prompt(100, first))
    pair.finish()
    return pair.news(name)


def test_a_transfer_that_takes_longer_than_computing_is_given_up_and_the_next_prompts_are_computed() -> None:
    """A page per second moves; a step of 100 tokens takes a second. Tokens are checked as for all pairs."""
    pair = Pair(SETTING)
    assert pair.fetches is not None
    worth = pair.fetches._worth = Worth()
    worth.note_step(prompt_step(1000), 10.0)
    news = slow(pair, "a", 1)
    assert news is not None
    assert news.failure == "the pages of there take longer than computing them"
    assert slow(pair, "b", 2) is None, "it was not asked for"
    stats = pair.here.loop.stats()
    assert (stats.fetches_declined, stats.remote_prefills) == (2, 0)
    assert stats.fetch_bytes_per_s > 0


def test_a_fast_link_is_used_and_its_way_is_told() -> None:
    pair = Pair(SETTING)
    assert pair.fetches is not None
    pair.fetches._worth = worth = Worth()
    worth.note_step(prompt_step(10), 1000.0)
    pair.transfers.transport = Transport("elsewhere")
    news = slow(pair, "a", 1)
    assert news is not None
    assert (news.failure, news.transport) == (None, "tcp")
    stats = pair.here.loop.stats()
    assert (stats.remote_prefills, stats.fetches_over_tcp, stats.fetches_declined) == (1, 1, 0)


# ---- transports ----


def machine(root: Path, boot: str, *, rdma: bool = False) -> Path:
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(boot + "\n")
    (root / "proc/self/ns").mkdir(parents=True)
    for name in ("pid", "ipc", "net"):
        (root / "proc/self/ns" / name).symlink_to(f"{name}:[1]")
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n" if rdma else "1: DOWN\n")
    return root


def test_what_carries_pages_follows_from_both_machines(tmp_path: Path) -> None:
    here = machine(tmp_path / "here", "a", rdma=True)
    there, poor = machine(tmp_path / "there", "b", rdma=True), machine(tmp_path / "poor", "c")
    ours, theirs, tcp = (own_transport({}, root) for root in (here, there, poor))
    assert [way(ours, one) for one in (ours, theirs, tcp)] == ["memory", "rdma", "tcp"]
    for allowed, expected in (("tcp", "tcp"), ("rc,sm", "rdma"), ("^rc", "tcp")):
        assert way(own_transport({"UCX_TLS": allowed}, here), theirs) == expected
    nowhere = own_transport({}, tmp_path / "nowhere")
    assert way(nowhere, nowhere) == "tcp", "what is not known is not equal"


def test_processes_with_other_sizes_of_messages_do_not_meet() -> None:
    """UCX ends a process that receives a message above its own limit."""
    ours = own_transport({})
    check_transport(ours, ours)
    with pytest.raises(ValueError, match="UCX_TCP_RX_SEG_SIZE differ: 128k 8k there, 128k 128k here"):
        check_transport(ours, own_transport({"UCX_TCP_RX_SEG_SIZE": "8k"}))
    with pytest.raises(ValueError, match="unknown there"):
        check_transport(ours, replace_segments(ours))


def replace_segments(transport: Transport) -> Transport:
    return Transport(transport.host, "", transport.has_rdma)
