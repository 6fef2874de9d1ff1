"""Work on requests beside streams."""

import asyncio
import threading
from itertools import pairwise

import pytest

from oscine.api.common.work import BODIES, INLINE_SIZE, InlineWork, run_in_thread
from tests.waiting import wait_until


class Work:
    """Inline work in which time passes, and what was done in each turn of the loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.inline = InlineWork(most_s=5.0, clock=lambda: self.now_s)
        self._turn: list[str] = []
        self.turns = [self._turn]

    async def do(self, name: str, seconds: float, error: Exception | None = None) -> None:
        def make() -> None:
            self._turn.append(name)
            self.now_s += seconds
            if error is not None:
                raise error

        await self.inline.run(make)

    async def watch(self) -> None:
        while True:
            self._turn = []  # the others have had their turn
            self.turns.append(self._turn)
            await asyncio.sleep(0)

    async def all(self, *pieces: asyncio.Future[None]) -> list[list[str]]:
        watching = asyncio.ensure_future(self.watch())  # behind them in each turn
        await asyncio.wait(pieces)
        watching.cancel()
        return [turn for turn in self.turns if turn]


def test_many_small_requests_share_the_turns_of_the_loop() -> None:
    async def go(work: Work) -> list[list[str]]:
        return await work.all(*(asyncio.ensure_future(work.do(name, 3.0)) for name in "abcdef"))

    assert asyncio.run(go(Work())) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_work_that_fails_takes_time_too() -> None:
    async def go(work: Work) -> list[list[str]]:
        failing = asyncio.ensure_future(work.do("a", 9.0, ValueError("refused")))
        turns = await work.all(failing, asyncio.ensure_future(work.do("b", 1.0)))
        with pytest.raises(ValueError, match="refused"):
            await failing
        return turns

    assert asyncio.run(go(Work())) == [["a"], ["b"]]


def test_a_loop_that_ended_in_its_turn_delays_no_later_one() -> None:
    work = Work()
    for name in "ab":
        asyncio.run(work.do(name, 9.0))
    assert work.turns == [["a", "b"]]


def test_between_two_calls_into_c_the_loop_goes_round() -> None:
    turns = 0
    calls: list[tuple[int, int]] = []  # the turns at the begin and at the end of each

    def call() -> None:
        begin = turns
        wait_until(lambda: turns > begin, "the loop goes round during a call")
        calls.append((begin, turns))

    async def go() -> None:
        nonlocal turns
        work = asyncio.gather(*(run_in_thread(call, INLINE_SIZE + 1, BODIES) for _ in range(3)))
        while not work.done():
            await asyncio.sleep(0)
            turns += 1

    asyncio.run(go())
    assert all(begin > end for (_, end), (begin, _) in pairwise(calls))
    assert len(calls) == 3


def test_a_call_ends_though_its_loop_is_closed() -> None:
    began, closed = threading.Event(), threading.Event()

    def call() -> str:
        began.set()
        assert closed.wait(30)
        return "done"

    async def begin() -> None:
        asking = asyncio.ensure_future(run_in_thread(call, INLINE_SIZE + 1, BODIES))
        while not began.is_set():
            await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(begin())
    closed.set()
    assert BODIES.submit(lambda: "the next one").result(30) == "the next one"
