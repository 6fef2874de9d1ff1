"""The messages of a migrating request to each of its engines, and the outputs that its reader gets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from oscine.engine.core.prefix_index import extend_digests, root_of
from oscine.engine.wire.messages import Cancel, Ending, Hello, Refused
from oscine.engine.wire.stream import EngineDied, EngineOverloaded
from oscine.extensions.replicas.client.dispatcher import MigrationLimits
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.types import EngineInfo, PrefillSource, RemotePrefill, TokenLogprobs
from tests.engine_process.harness import read, request, run, tokens
from tests.extensions.cluster.local_placer import SEED, ScriptedPlacer
from tests.extensions.cluster.raw_engine import RawEngine
from tests.waiting import until

PROMPT = list(range(200))  # three pages and a bit


@asynccontextmanager
async def over(
    *engines: RawEngine, limits: MigrationLimits | None = None
) -> AsyncIterator[tuple[ScriptedPlacer, ClusterEngine]]:
    """The first engine that a request does not exclude takes it."""

    def answer(placement: Placement) -> Place:
        free = [engine for engine in engines if engine.replica not in placement.exclude]
        if not free:
            raise NoPlace("all are excluded", retry_after_s=3.0, overloaded=True)
        return free[0].place(PrefillSource("p", "tcp://127.0.0.1:9", 100, 1.0))

    placer = ScriptedPlacer(answer)
    cluster = ClusterEngine(placer, "model", prefix_seed=SEED, limits=limits)
    await cluster.start()
    await cluster.wait_ready()
    try:
        yield placer, cluster
    finally:
        await cluster.stop()


def digests(known: list[int]) -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, known, len(known) // 64, page_size=64, root=root_of(SEED))
    return found


def test_the_next_engine_gets_all_that_is_known_and_the_reader_each_thing_once() -> None:
    scores = [TokenLogprobs(7, -0.5, ())]

    async def test() -> None:
        with RawEngine("a") as a, RawEngine("b") as b:
            async with over(a, b) as (placer, cluster):
                stream = cluster.submit(request("r", PROMPT, max_tokens=100, seed=3, prompt_logprobs=0))
                asked = await a.request()
                assert (asked.prompt_token_ids, asked.generated_token_ids) == (PROMPT, [])
                assert asked.prefill == PrefillSource("p", "tcp://127.0.0.1:9", 100, 1.0)
                moved = RemotePrefill("p", 0.1, 0.1, 3, 2, 1000)
                await a.answer(asked, [1], num_cached_tokens=64, queue_s=2.0, prompt_logprobs=scores, prefill=moved)
                await a.answer(asked, list(range(2, 61)))
                before = [await anext(stream)]
                while len(tokens([o for outputs in before for o in outputs])) < 60:
                    before.append(await anext(stream))
                a.end()
                again = await b.request()
                assert again.generated_token_ids == list(range(1, 61))
                assert (again.prompt_token_ids, again.sampling) == (asked.prompt_token_ids, asked.sampling)
                await b.answer(again, [61], num_cached_tokens=192, queue_s=5.0, prompt_logprobs=scores, prefill=moved)
                await b.answer(again, [62], finish_reason="stop")
                outputs = [o for outputs in before for o in outputs] + await read(stream)
            assert tokens(outputs) == list(range(1, 63))
            assert {o.request_id for o in outputs} == {"r"}
            assert [o.num_cached_tokens for o in outputs if o.num_cached_tokens] == [64]
            assert [o.prompt_logprobs for o in outputs if o.prompt_logprobs] == [scores]
            assert [o.prefill for o in outputs if o.prefill] == [moved]
            assert 2.0 <= sum(o.queue_s for o in outputs) < 7.0  # the first engine's, and none of the second's 5 s
            first, second = placer.asked
            assert (first.digests, second.digests) == (digests(PROMPT), digests([*PROMPT, *range(1, 61)]))
            assert (first.num_tokens, first.max_tokens, first.exclude) == (200, 100, [])
            assert (second.num_tokens, second.max_tokens, second.exclude) == (260, 40, ["a"])
            assert cluster.migrations.migrations == 1
            assert cluster.migrations.pause_s == cluster.migrations.longest_pause_s > 0

    run(test)


def test_an_engine_that_says_it_ends_and_one_that_is_full_are_left_at_once() -> None:
    async def test() -> None:
        with RawEngine("a") as a, RawEngine("b") as b, RawEngine("c") as c:
            async with over(a, b, c) as (placer, cluster):
                stream = cluster.submit(request("r", PROMPT))
                asked = await a.request()
                await a.send(Ending("out of memory"))
                await a.answer(asked, [], finish_reason="error", error="out of memory")
                asked = await b.request()
                await b.send(Refused(asked.request_id, "full"))
                asked = await c.request()
                await c.answer(asked, [5], finish_reason="stop")
                assert tokens(await read(stream)) == [5]
            assert [sorted(placement.exclude) for placement in placer.asked] == [[], ["a"], ["a", "b"]]

    run(test)


def test_an_engine_that_is_to_stop_is_no_loss() -> None:
    async def test() -> None:
        with RawEngine("a") as a, RawEngine("b") as b:
            async with over(a, b, limits=MigrationLimits(max_losses=0)) as (_, cluster):
                stream = cluster.submit(request("r", PROMPT))
                await a.request()
                await a.send(Ending("it is stopped", asked=True))
                await b.answer(await b.request(), [5], finish_reason="stop")
                assert tokens(await read(stream)) == [5]
                assert (cluster.restarts, cluster.migrations.migrations, cluster.migrations.failures) == (0, 1, 0)

    run(test)


def test_a_refused_newcomer_is_told_when_to_come_again() -> None:
    async def test() -> None:
        with RawEngine("a") as a:
            async with over(a) as (_, cluster):
                stream = cluster.submit(request("r", PROMPT))
                await a.send(Refused((await a.request()).request_id, "full"))
                with pytest.raises(EngineOverloaded, match="all are excluded") as caught:
                    await read(stream)
                assert caught.value.retry_after_s == 3.0

    run(test)


def test_an_engine_that_is_not_there_counts_as_no_loss() -> None:
    async def test() -> None:
        gone = RawEngine("gone")
        gone.end()
        with RawEngine("b") as b:
            async with over(gone, b) as (_, cluster):
                stream = cluster.submit(request("r", PROMPT))
                await b.answer(await b.request(), [5], finish_reason="stop")
                assert tokens(await read(stream)) == [5]
                assert (cluster.restarts, cluster.migrations.migrations) == (0, 0)

    run(test)


def test_requests_share_a_link_and_a_cancelled_one_is_told_to_the_engine() -> None:
    async def test() -> None:
        with RawEngine("a") as a:
            async with over(a) as (_, cluster):
                streams = [cluster.submit(request(str(i), PROMPT)) for i in range(3)]
                assert isinstance(await a.receive(), Hello)
                asked = [await a.request() for _ in streams]
                streams[1].close()
                assert await a.receive() == Cancel(asked[1].request_id)
                await a.answer(asked[1], [5])  # was under way
                for i in (0, 2):
                    await a.answer(asked[i], [i], finish_reason="length")
                    assert tokens(await read(streams[i])) == [i]

    run(test)


def test_a_request_that_still_waits_for_a_place_can_go() -> None:
    class Waiting(ScriptedPlacer):
        cancelled = False

        async def place(self, placement: Placement) -> Place:
            try:
                await asyncio.sleep(3600)
            finally:
                self.cancelled = True
            return await super().place(placement)

    async def test() -> None:
        placer = Waiting(lambda placement: pytest.fail("placed"))
        cluster = ClusterEngine(placer, "model")
        await cluster.start()
        await cluster.wait_ready()
        stream = cluster.submit(request("r"))
        await asyncio.sleep(0.01)
        cluster.cancel("r")
        assert (await read(stream))[-1].finish_reason == "cancelled"
        await until(lambda: placer.cancelled)
        await cluster.stop()

    run(test)


def test_what_a_placer_does_not_say_is_a_clean_error_too() -> None:
    def answer(placement: Placement) -> Place:
        raise KeyError(placement.model)

    async def test() -> None:
        cluster = ClusterEngine(ScriptedPlacer(answer), "model")
        await cluster.start()
        await cluster.wait_ready()
        with pytest.raises(EngineDied, match="could not be placed"):
            await read(cluster.submit(request("r")))
        await cluster.stop()

    run(test)


def test_what_cannot_be_sent_is_a_clean_error_too() -> None:
    nowhere = Place("nowhere", "tcp://127.0.0.1:no port", None, num_overlap_tokens=0, queue_s=0.0)

    async def test() -> None:
        with RawEngine("a") as a:
            async with over(a) as (placer, cluster):
                for prompt in ([1 << 70], PROMPT):  # no such number in MessagePack; no such place
                    with pytest.raises(EngineDied, match="could not be placed"):
                        await read(cluster.submit(request("r", prompt)))
                    placer.answer = lambda placement: nowhere
                placer.answer = lambda placement: a.place()
                stream = cluster.submit(request("r"))
                await a.answer(await a.request(), [5], finish_reason="stop")
                assert tokens(await read(stream)) == [5]

    run(test)


@pytest.mark.long
def test_a_placer_that_stumbles_costs_a_moving_request_some_time() -> None:
    async def test() -> None:
        with RawEngine("a") as a, RawEngine("b") as b:
            async with over(a, b) as (placer, cluster):
                stream = cluster.submit(request("r", PROMPT))
                await a.answer(await a.request(), [1])
                begun = await anext(stream)
                answer, placer.answer = placer.answer, stumble
                a.end()
                await until(lambda: len(placer.asked) > 2)
                placer.answer = answer
                await b.answer(await b.request(), [2], finish_reason="stop")
                assert tokens(begun + await read(stream)) == [1, 2]

    run(test)


def stumble(placement: Placement) -> Place:
    raise AssertionError(placement.model)


def test_a_prompt_that_has_grown_is_looked_up_anew() -> None:
    async def test() -> None:
        with RawEngine("a") as a:
            async with over(a) as (placer, cluster):
                prompt = PROMPT.copy()
                for i in range(2):
                    stream = cluster.submit(request(str(i), prompt))
                    await a.answer(await a.request(), [5], finish_reason="stop")
                    await read(stream)
                    prompt += PROMPT
                assert [placement.digests for placement in placer.asked] == [digests(PROMPT), digests(PROMPT * 2)]

    run(test)


def test_a_prompt_is_looked_up_where_its_salt_was() -> None:
    async def test() -> None:
        with RawEngine("a") as a:
            async with over(a) as (placer, cluster):
                for i, salt in enumerate(["", "mine", "mine", "yours"]):
                    stream = cluster.submit(replace(request(str(i), PROMPT), cache_salt=salt))
                    asked = await a.request()
                    assert asked.cache_salt == salt
                    await a.answer(asked, [5], finish_reason="stop")
                    await read(stream)
                plain, mine, again, yours = (placement.digests for placement in placer.asked)
                assert plain == digests(PROMPT)
                assert mine == again
                assert len({*plain, *mine, *yours}) == 3 * len(plain)

    run(test)


def test_what_a_rolling_update_changes_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.replicas.client.engine._REFRESH_S", 0.01)

    class Updated(ScriptedPlacer):
        asked_for_info = 0

        async def describe(self, model: str) -> EngineInfo:
            self.asked_for_info += 1
            if self.asked_for_info == 2:
                raise NoPlace("the router is gone", retry_after_s=0.1, overloaded=False)
            if self.asked_for_info == 3:
                raise AssertionError
            info = await super().describe(model)
            return info if self.asked_for_info == 1 else replace(info, max_model_len=8192)

    async def test() -> None:
        cluster = ClusterEngine(Updated(lambda placement: pytest.fail("placed")), "model")
        await cluster.start()
        assert (await cluster.wait_ready()).max_model_len == 4096
        await until(lambda: cluster.info is not None and cluster.info.max_model_len == 8192)
        assert (cluster.state, cluster.error) == ("ready", None)
        await cluster.stop()

    run(test)
