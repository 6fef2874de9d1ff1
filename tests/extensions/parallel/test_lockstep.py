"""Engines with their own requests whose experts are shared: each answers as an engine alone does."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pytest

from oscine.engine.build import build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.extensions.parallel.clock import StepClock
from oscine.extensions.parallel.lockstep import Agreed
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.types import EngineStats, GenerationRequest, RankHandle, RankLostError
from tests.executor import grammars
from tests.executor.tiny import PAGE, prompt, request
from tests.tiny import DEEP
from tests.waiting import DEADLINE_S

DIVISIBLE = replace(DEEP, intermediate_size=128)  # by 4 ranks
LIMIT_S = DEADLINE_S
SHORT_S = 0.3
T = TypeVar("T")


def options(folder: Path, *, overlap: bool = True, kv_cache_bytes: int = 1 << 20) -> EngineOptions:
    (folder / "config.json").write_text(json.dumps(DIVISIBLE.to_dict()))
    grammars.tokenizer_file(folder)
    return EngineOptions(
        model=ModelOptions(random_weights=str(folder), tokenizer=str(folder), device="cpu"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=kv_cache_bytes),
        scheduler=replace(SchedulerOptions(), max_num_seqs=8, max_num_batched_tokens=64, overlap=overlap),
        quiet=True,
    )


class Client:
    """Runs a loop, and does things once so many tokens have come out of it."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.tokens: dict[str, list[int]] = {}
        self._count = 0

    def run(self, *asked: GenerationRequest, later: Sequence[tuple[int, GenerationRequest | str]] = ()) -> EngineStats:
        """`later`: after as many tokens, a request comes, or the one of this name is cancelled."""
        pending = list(later)
        for one in asked:
            self._ask(one)
        while self.loop.stats().num_running + self.loop.stats().num_waiting or pending:
            while pending and pending[0][0] <= self._count:
                self._ask(pending.pop(0)[1])
            self.step()
        return self.loop.stats()

    def _ask(self, what: GenerationRequest | str) -> None:
        if isinstance(what, str):
            self.loop.cancel(what)
        else:
            self.tokens[what.request_id] = []
            self.loop.add(what)

    def step(self) -> None:
        for output in self.loop.step():
            assert output.error is None
            self.tokens[output.request_id] += output.token_ids
            self._count += len(output.token_ids)


def on_ranks(num_ranks: int, call: Callable[[RankHandle], T]) -> list[T]:
    """Each rank is a thread. The first that fails ends all."""
    meeting = Rendezvous(num_ranks)

    def serve(rank: int) -> T:
        try:
            return call(meeting.handle(rank))
        except BaseException:
            meeting.lose(rank)
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        running = [threads.submit(serve, rank) for rank in range(num_ranks)]
        return [rank.result(LIMIT_S) for rank in running]


def in_lockstep(options: EngineOptions, *uses: Callable[[Client], T]) -> list[tuple[T, dict[str, list[int]]]]:
    """What each rank's use of its engine gives, and its tokens. All take part in steps until the last is done."""
    finished: list[int] = []

    def serve(handle: RankHandle) -> tuple[T, dict[str, list[int]]]:
        client = Client(build_engine(options, handle).loop)
        result = uses[handle.rank](client)
        finished.append(handle.rank)
        while len(finished) < len(uses):
            if client.loop.has_work:
                client.step()
            time.sleep(0.0002)
        return result, client.tokens

    return on_ranks(len(uses), serve)


def alone(options: EngineOptions, *asked: GenerationRequest) -> dict[str, list[int]]:
    client = Client(build_engine(options).loop)
    client.run(*asked)
    assert len({token for tokens in client.tokens.values() for token in tokens}) > 2, "a model that says nothing"
    return client.tokens


@pytest.mark.long
@pytest.mark.parametrize(
    ("overlap", "drafting", "skewed"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
    ids=["overlap", "one after the other", "drafts", "popular experts"],
)
def test_uneven_loads(tmp_path: Path, overlap: bool, drafting: bool, skewed: bool) -> None:
    plain = options(tmp_path, overlap=overlap)
    if skewed:
        plain = replace(plain, model=replace(plain.model, random_weights=f"{tmp_path}:skewed"))
    given = replace(plain, speculation=SpeculationOptions("ngram", lookup_min=1)) if drafting else plain
    asked = [
        [request("one", prompt(70), max_tokens=20)],
        [request(f"seven {n}", prompt(5 + 9 * n, n), max_tokens=12, temperature=n % 2, seed=n) for n in range(7)],
        [],
        [request("long", prompt(3), max_tokens=40)],
    ]
    found = in_lockstep(given, *((lambda client, mine=mine: client.run(*mine)) for mine in asked))
    assert {name: tokens for _, of_rank in found for name, tokens in of_rank.items()} == alone(plain, *chain(*asked))
    assert any(stats.accepted_tokens for stats, _ in found) == drafting


@pytest.mark.long
def test_prompts_that_arrive_while_others_decode_prefixes_and_cancellations(tmp_path: Path) -> None:
    given = options(tmp_path)
    first, again = request("first", prompt(80), max_tokens=10), request("again", prompt(80), max_tokens=10)
    late, stopped = request("late", prompt(100, 5), max_tokens=10), request("stopped", prompt(9, 3), max_tokens=60)
    steady = request("steady", prompt(20, 2), max_tokens=60)
    (stats, repeated), (_, interrupted) = in_lockstep(
        given,
        lambda client: (client.run(first), client.run(again))[1],
        lambda client: client.run(steady, stopped, later=[(30, late), (60, "stopped")]),
    )
    expected = alone(given, first, late, stopped, steady)
    assert repeated == {"first": expected["first"], "again": expected["first"]}
    assert stats.prefix_hits == 64
    cut = interrupted.pop("stopped")
    assert 0 < len(cut) < 60
    assert cut == expected["stopped"][: len(cut)]
    assert interrupted == {"late": expected["late"], "steady": expected["steady"]}


@pytest.mark.long
def test_preemption_on_one_rank(tmp_path: Path) -> None:
    roomy, narrow = options(tmp_path), options(tmp_path, kv_cache_bytes=120_000)
    many = [request(str(n), prompt(30, n), max_tokens=50) for n in range(5)]
    other = request("other", prompt(11), max_tokens=30)
    (stats, crowded), (_, calm) = in_lockstep(narrow, lambda c: c.run(*many), lambda c: c.run(other))
    assert stats.preemptions
    assert crowded | calm == alone(roomy, *many, other)


@pytest.mark.long
def test_a_grammar_on_one_rank(tmp_path: Path) -> None:
    given = options(tmp_path)
    ruled = request(
        "ruled", prompt(7), max_tokens=20, temperature=1.0, grammar=grammars.grammar(2, 4), stop_token_ids=(96,)
    )
    free = request("free", prompt(7), max_tokens=40)
    (_, mine), (_, others) = in_lockstep(given, lambda c: c.run(ruled), lambda c: c.run(free))
    assert mine | others == alone(given, ruled, free)


def test_engines_without_work_make_no_steps(tmp_path: Path) -> None:
    def rest(client: Client) -> int:
        time.sleep(0.05)
        assert not client.loop.has_work
        return client.loop.stats().steps

    assert in_lockstep(options(tmp_path), rest, rest) == [(0, {}), (0, {})]


def test_all_ranks_know_the_step(tmp_path: Path) -> None:
    def steps(handle: RankHandle) -> list[Agreed]:
        clock = StepClock(handle, LIMIT_S)
        clock.serve()
        return [clock.agree(handle.rank * 100 + n, replays=handle.rank != n) for n in range(200)]

    assert on_ranks(3, steps) == [[Agreed((n, 100 + n, 200 + n), n > 2) for n in range(200)]] * 3


def test_a_rank_that_does_not_come_ends_the_group() -> None:
    meeting = Rendezvous(2)
    early, other = clocks = [StepClock(meeting.handle(rank), SHORT_S) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(StepClock.serve, clocks))
    assert not other.is_awaited
    with pytest.raises(RankLostError, match=f"rank 1 of the group did not come within {SHORT_S} s"):
        early.agree(1, replays=True)
    assert other.is_awaited, "the group has ended"
    with pytest.raises(RankLostError, match="rank 1 of the group ended"):
        other.agree(1, replays=True)
    with pytest.raises(RankLostError, match="rank 1 of the group ended"):
        StepClock(meeting.handle(1), SHORT_S).agree(1, replays=True)
