"""Many engines as one: real engine processes behind a ClusterEngine, killed while they stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from oscine.chat.grammar import JsonFormat, text_grammar
from oscine.engine.process.client import EngineDied, EngineOverloaded
from oscine.engine.wire.stream import RequestStream
from oscine.extensions.replicas.client.dispatcher import MigrationLimits
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.types import GenerationOutput
from tests.engine_process.harness import options, read, request, run, running, tokens
from tests.extensions.cluster.local_placer import RETRY_S, Fleet, clustered, guest
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]  # each starts engines
SLOW_S = 0.02
RETURN = 1913  # of the embedded model
NO_TOKEN = 10_000  # see unchecked_engines
ENDLESS = 3000  # at this pace it outlasts the patience of a test
JSON = text_grammar(JsonFormat({"type": "array", "items": {"type": "boolean"}, "minItems": 16, "maxItems": 16}))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines share the machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


async def first(stream: RequestStream, count: int) -> list[GenerationOutput]:
    """Outputs with at least so many tokens; the stream goes on."""
    outputs: list[GenerationOutput] = []
    while len(tokens(outputs)) < count:
        outputs += await anext(stream)
    return outputs


async def read_past_a_death(fleet: Fleet, streams: list[RequestStream], name: str) -> list[list[GenerationOutput]]:
    """All that the streams say, though an engine is killed when each has begun."""
    begun = await asyncio.gather(*(first(stream, 5) for stream in streams))
    fleet.kill(name)
    rest = await asyncio.gather(*map(read, streams))
    return [before + after for before, after in zip(begun, rest, strict=True)]


# What can be asked of a sequence, each so that it is long enough to be interrupted.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 11, "logprobs": 0},
    "narrow": {"temperature": 1.5, "seed": 12, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3},
    "penalised": {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "grammar": {"temperature": 1.0, "seed": 13, "grammar": JSON, "max_tokens": 120, "stop_token_ids": (RETURN,)},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1},
    "patient": {"temperature": 0.8, "seed": 14, "min_tokens": 40},
}


def nano() -> EngineOptions:
    return EngineOptions(quiet=True)


def logprobs_of(outputs: list[GenerationOutput]) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for output in outputs for entry in output.logprobs or ()]


def test_whatever_was_asked_goes_on_elsewhere_as_if_nothing_had_happened() -> None:
    async def test() -> None:
        async with clustered(nano(), nano()) as (fleet, cluster):
            asked = [
                request(kind, list(range(100, 150 + i)), **{"max_tokens": 400, **sampling})
                for i, (kind, sampling) in enumerate(KINDS.items())
            ]
            expected = await asyncio.gather(*(read(cluster.submit(one)) for one in asked))
            found = await read_past_a_death(fleet, [cluster.submit(one) for one in asked], "0")
            assert any(replicas[1:] == ["0", "1"] for replicas in fleet.where.values())
            for one, before, after in zip(asked, expected, found, strict=True):
                assert tokens(after) == tokens(before), one.request_id
                assert after[-1].finish_reason == before[-1].finish_reason
                assert {output.request_id for output in after} == {one.request_id}
                ids, values = zip(*(logprobs_of(before) or [(0, 0.0)]), strict=True)
                ids_after, values_after = zip(*(logprobs_of(after) or [(0, 0.0)]), strict=True)
                assert ids_after == ids
                assert values_after == pytest.approx(values, abs=1e-3)
                of_prompt = [output.prompt_logprobs for output in after if output.prompt_logprobs is not None]
                assert len(of_prompt) == (one.sampling.prompt_logprobs is not None)
            assert cluster.restarts == 1
            assert cluster.migrations.migrations >= 3
            assert cluster.migrations.failures == 0
            assert cluster.migrations.longest_pause_s > 0
            await fleet.wait_ready()
            assert tokens(await read(cluster.submit(asked[0]))) == tokens(expected[0])

    run(test)


def test_a_request_may_lose_several_engines(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with clustered(slow, slow) as (fleet, cluster):
            expected = await read(cluster.submit(request("calm", max_tokens=60)))
            stream = cluster.submit(request("hunted", max_tokens=60))
            outputs = []
            for _ in range(3):
                outputs += await first(stream, 5)
                fleet.kill(fleet.where["hunted"][-1])
            outputs += await read(stream)
            assert tokens(outputs) == tokens(expected)
            assert outputs[-1].finish_reason == "length"
            assert len(fleet.where["hunted"]) == 4

    run(test)


def test_an_engine_that_is_stopped_passes_its_requests_on_at_once(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with clustered(slow, slow, limits=MigrationLimits(max_losses=0)) as (fleet, cluster):
            expected = await read(cluster.submit(request("calm", max_tokens=60)))
            streams = [cluster.submit(request(str(i), max_tokens=60)) for i in range(6)]
            begun = await asyncio.gather(*(first(stream, 5) for stream in streams))
            await fleet.engines["0"].stop()
            for before, rest in zip(begun, await asyncio.gather(*map(read, streams)), strict=True):
                assert tokens(before + rest) == tokens(expected)
            assert (cluster.restarts, cluster.migrations.migrations) == (0, 3)

    run(test)


@pytest.mark.usefixtures("unchecked_engines")
def test_a_failing_step_costs_others_a_pause_and_the_request_behind_it_its_tries() -> None:
    async def test() -> None:
        async with clustered(nano(), nano(), limits=MigrationLimits(max_losses=1)) as (fleet, cluster):
            expected = await read(cluster.submit(request("calm", max_tokens=1000, temperature=0.0)))
            stream = cluster.submit(request("victim", max_tokens=1000, temperature=0.0))
            outputs = await first(stream, 5)
            engine = fleet.engines[fleet.where["victim"][0]]
            broken = engine.pid
            async with running(guest(fleet.address(fleet.where["victim"][0]))) as other:
                with pytest.raises(EngineDied, match="the engine failed"):
                    await read(other.submit(request("bad", [NO_TOKEN])))
            outputs += await read(stream)
            assert tokens(outputs) == tokens(expected)
            assert len(fleet.where["victim"]) == 2
            await until(lambda: engine.pid != broken)
            await fleet.wait_ready()
            with pytest.raises(EngineDied, match="2 engines broke while they had this request"):
                await read(cluster.submit(request("poison", [NO_TOKEN])))
            assert len(fleet.where["poison"]) == 2
            assert cluster.migrations.failures == 1

    run(test)


def test_a_bad_request_is_nobodys_failure(model_folder: Path) -> None:
    async def test() -> None:
        fake = options(model_folder)
        async with clustered(fake, fake) as (fleet, cluster):
            [bad] = await read(cluster.submit(request("long", [1] * 70_000)))
            assert (bad.finish_reason, bad.request_id) == ("error", "long")
            assert "70000 tokens" in str(bad.error)
            assert fleet.where["long"] == ["0"]
            assert (cluster.restarts, cluster.migrations.migrations) == (0, 0)

    run(test)


def test_a_full_engine_passes_requests_on_until_all_are_full(model_folder: Path) -> None:
    async def test() -> None:
        small = options(model_folder, fake_step_s=SLOW_S, max_num_seqs=1, max_waiting=1)
        async with clustered(small, small) as (fleet, cluster):
            endless = []
            for i in range(4):
                endless.append(cluster.submit(request(f"endless {i}", max_tokens=ENDLESS)))
                await until(lambda i=i: fleet.running == i + 1)  # type: ignore[misc]
            fleet.placed["0"] -= 1  # it looks idler than it is
            with pytest.raises(EngineOverloaded) as caught:
                await read(cluster.submit(request("too many")))
            assert caught.value.retry_after_s == RETRY_S
            assert sorted(fleet.where["too many"]) == ["0", "1"]
            for stream in endless:
                stream.close()
            await until(lambda: fleet.running == 0)
            await asyncio.sleep(0)
            assert len(tokens(await read(cluster.submit(request("too many"))))) == 8

    run(test)


def test_cancelling_frees_the_engine_and_never_waits(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with clustered(slow) as (fleet, cluster):
            stream = cluster.submit(request("running", max_tokens=ENDLESS))
            await first(stream, 2)
            cluster.cancel("running")
            assert (await read(stream))[-1].finish_reason == "cancelled"
            async with cluster.submit(request("closed", max_tokens=ENDLESS)) as closed:
                await first(closed, 2)
            await until(lambda: fleet.running == fleet.pages_held == 0)
            stream = cluster.submit(request("lost", max_tokens=ENDLESS))
            await first(stream, 2)
            fleet.kill("0")
            await until(lambda: cluster.restarts == 1)
            cluster.cancel("lost")
            places = fleet.where["lost"].copy()
            assert (await read(stream))[-1].finish_reason == "cancelled"
            await fleet.wait_ready()
            assert len(tokens(await read(cluster.submit(request("after"))))) == 8
            assert fleet.where["lost"] == places

    run(test)


def test_the_only_engine_comes_back_in_time_or_does_not(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with clustered(slow, limits=MigrationLimits(timeout_s=60.0)) as (fleet, cluster):
            stream = cluster.submit(request("patient", max_tokens=60))
            outputs = await first(stream, 5)
            fleet.kill("0")
            assert len(tokens(outputs + await read(stream))) == 60
            assert fleet.where["patient"] == ["0", "0"]
        async with clustered(slow, limits=MigrationLimits(timeout_s=0.3)) as (fleet, cluster):
            stream = cluster.submit(request("out of luck", max_tokens=60))
            await first(stream, 5)
            await fleet.stop()
            with pytest.raises(EngineDied, match="nobody has room"):
                await read(stream)
            with pytest.raises(EngineDied) as caught:
                await read(cluster.submit(request("too late")))
            assert caught.value.retry_after_s == RETRY_S
            assert cluster.state == "ready"  # as one that is scaled to zero
            assert cluster.error == "nobody has room"

    run(test)


def test_what_engines_report_is_added_up_over_their_lives(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.replicas.client.dispatcher._IDLE_S", 0.05)

    async def test() -> None:
        fake = options(model_folder)
        async with clustered(fake, fake) as (fleet, cluster):
            for i in range(4):
                assert len(tokens(await read(cluster.submit(request(str(i)))))) == 8
                await until(lambda i=i: cluster.stats.generated_tokens == 8 * (i + 1))  # type: ignore[misc]
                await until(lambda: cluster.stats.full_pages_total == 0)  # the idle link is closed
            fleet.kill("0")
            await until(lambda: fleet.engines["0"].state != "ready")
            await fleet.wait_ready()
            fleet.placed["1"] += 10
            for i in range(2):
                await read(cluster.submit(request(f"again {i}")))
            await until(lambda: cluster.stats.generated_tokens == 48)
            assert cluster.restarts == 0  # nothing ran there

    run(test)


def test_ends_of_a_cluster(model_folder: Path) -> None:
    async def test() -> None:
        async with clustered(options(model_folder, fake_step_s=SLOW_S)) as (_, cluster):
            stream = cluster.submit(request("live", max_tokens=ENDLESS))
            await first(stream, 2)
            with pytest.raises(ValueError, match="'live' is in use"):
                cluster.submit(request("live"))
            await cluster.stop()
            with pytest.raises(EngineDied, match="stopped"):
                await read(stream)
            with pytest.raises(EngineDied, match="stopped"):
                cluster.submit(request("late"))

    run(test)


def test_a_cluster_is_ready_when_its_model_can_be_served(model_folder: Path) -> None:
    async def test() -> None:
        fleet = Fleet(
            [options(model_folder), EngineOptions(model=ModelOptions(model=str(model_folder)), executor="fake")]
        )
        cluster = ClusterEngine(fleet, "model")
        await cluster.start()
        await until(lambda: cluster.error == "model is loading")
        assert (cluster.state, cluster.info) == ("starting", None)
        with pytest.raises(EngineDied, match="model is loading"):
            cluster.submit(request("early"))
        await fleet.start()
        info = await cluster.wait_ready()
        assert (cluster.state, cluster.error, cluster.info) == ("ready", None, info)
        await cluster.stop()
        await fleet.stop()

    run(test)
