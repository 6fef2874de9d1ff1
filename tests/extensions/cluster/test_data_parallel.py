"""Several engines behind one API process: real engines, the real server, and no Ray."""

import asyncio
import os
import signal
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from oscine.engine.process.client import EngineDied, EngineError
from oscine.engine.wire.stream import RequestStream
from oscine.extensions.replicas.data_parallel import DataParallelEngine
from oscine.settings.config import Config, EngineOptions, ModelOptions, PeerOptions, SchedulerOptions, ServerOptions
from oscine.settings.devices import devices_of, engines_of
from oscine.types import GenerationOutput
from tests.api.test_metrics import samples, total
from tests.children import children
from tests.engine_process.harness import options, read, request, run, tokens
from tests.extensions.parallel.test_lost_ranks import is_alive
from tests.server import ServerProcess
from tests.waiting import until, wait_until

SLOW_S = 0.02
ENDLESS = 3000
MODEL = "oscine-nano"


@asynccontextmanager
async def parallel(
    *engines: EngineOptions, max_waiting: int = 64, share_experts: bool = False
) -> AsyncIterator[DataParallelEngine]:
    """Ready, all of them."""
    engine = DataParallelEngine(engines, "model", max_waiting, share_experts=share_experts)
    await engine.start()
    try:
        await engine.wait_ready()
        await asyncio.gather(*(one.wait_ready() for one in engine.engines.values()))
        yield engine
    finally:
        await engine.stop()


async def first(stream: RequestStream, count: int) -> list[GenerationOutput]:
    outputs: list[GenerationOutput] = []
    while len(tokens(outputs)) < count:
        outputs += await anext(stream)
    return outputs


def kill(engine: DataParallelEngine, name: str) -> None:
    pid = engine.engines[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def where(stream: RequestStream) -> list[str]:
    return [attempt.replica for attempt in stream.attempts]


async def idle(engine: DataParallelEngine, num_requests: int) -> None:
    """Until the router has heard that the engines got these requests and that nothing runs."""

    async def runs() -> bool:
        stats = [one.stats for one in (await engine.router.snapshot()).replicas]
        got = sum(one.requests for one in stats)
        return got < num_requests or any(one.num_running + one.queued_tokens for one in stats)

    while await runs():
        await asyncio.sleep(0.01)


def test_requests_are_spread_and_go_back_to_their_prefix(model_folder: Path) -> None:
    async def test() -> None:
        fake = options(model_folder)
        async with parallel(fake, fake) as engine:
            prompts = {name: [i + 1] * 640 for i, name in enumerate("abcdef")}
            streams = {name: engine.submit(request(name, prompt)) for name, prompt in prompts.items()}
            for stream in streams.values():
                await read(stream)
            assert {*map(tuple, map(where, streams.values()))} == {("0",), ("1",)}
            for i, (name, prompt) in enumerate(prompts.items()):
                await idle(engine, len(prompts) + i)
                again = engine.submit(request(f"{name} again", [*prompt, 7, 8, 9]))
                outputs = await read(again)
                assert where(again) == where(streams[name])
                assert max(output.num_cached_tokens for output in outputs) == 640

    run(test)


@pytest.mark.parametrize("kind", ["fake", "embedded"])
def test_an_engine_that_is_killed_costs_its_streams_a_pause(kind: str, model_folder: Path) -> None:
    fake = kind == "fake"
    one = options(model_folder, fake_step_s=SLOW_S) if fake else EngineOptions(quiet=True, num_threads=1)
    count = 32 if fake else 300  # more than are generated while one is killed

    async def test() -> None:
        async with parallel(one, one) as engine:
            asked = [request(str(i), [10 + i] * 70, max_tokens=count, temperature=0.0) for i in range(4)]
            expected = [tokens(outputs) for outputs in await asyncio.gather(*(read(engine.submit(r)) for r in asked))]
            streams = [engine.submit(replace(r, request_id=f"{r.request_id} again")) for r in asked]
            begun = await asyncio.gather(*(first(stream, 5) for stream in streams))
            victim = where(streams[0])[0]
            kill(engine, victim)
            rest = await asyncio.gather(*map(read, streams))
            found = [tokens(before + after) for before, after in zip(begun, rest, strict=True)]
            assert found == expected
            assert engine.state == "ready"
            assert engine.migrations.migrations == 2
            assert engine.migrations.failures == 0
            await until(lambda: engine.restarts == 1)
            await engine.engines[victim].wait_ready()
            while {one.state for one in (await engine.router.snapshot()).replicas} != {"ready"}:
                await asyncio.sleep(0.01)

    run(test)


def test_without_any_engine_it_restarts_and_requests_that_ran_go_on(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with parallel(slow, slow) as engine:
            stream = engine.submit(request("patient", max_tokens=60))
            outputs = await first(stream, 5)
            kill(engine, "0")
            kill(engine, "1")
            await until(lambda: engine.state == "restarting")
            with pytest.raises(EngineDied):
                engine.submit(request("too soon"))
            assert len(tokens(outputs + await read(stream))) == 60
            assert engine.state == "ready"

    run(test)


def test_statistics_are_of_all_engines_and_all_their_lives(model_folder: Path) -> None:
    async def test() -> None:
        fake = options(model_folder)
        async with parallel(fake, fake) as engine:
            for i in range(6):
                assert len(tokens(await read(engine.submit(request(str(i), [i + 1] * 640))))) == 8
            await until(lambda: engine.stats.generated_tokens == 48)
            pages = engine.stats.full_pages_total
            assert pages == sum(one.stats.full_pages_total for one in engine.engines.values()) > 0
            kill(engine, "0")
            await until(lambda: engine.restarts == 1)
            await engine.engines["0"].wait_ready()
            await until(lambda: engine.stats.full_pages_total == pages)
            assert engine.stats.generated_tokens == 48

    run(test)


def test_an_engine_that_cannot_start_leaves_the_work_to_the_others(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fake, broken = options(model_folder), EngineOptions(ModelOptions(model="/nowhere"), executor="fake")
        engine = DataParallelEngine([broken, fake], "model")
        await engine.start()
        await engine.wait_ready()
        stream = engine.submit(request("r"))
        assert len(tokens(await read(stream))) == 8
        assert where(stream) == ["1"]
        await until(lambda: "engine 0 failed for good" in caplog.text)
        await engine.stop()
        engine = DataParallelEngine([broken, broken], "model")
        await engine.start()
        with pytest.raises(EngineError, match="/nowhere"):
            await engine.wait_ready()
        assert engine.state == "failed"
        await engine.stop()

    run(test)


def test_stopping_ends_streams_and_processes(model_folder: Path) -> None:
    async def test() -> None:
        slow = options(model_folder, fake_step_s=SLOW_S)
        async with parallel(slow, slow) as engine:
            pids = [one.pid for one in engine.engines.values()]
            stream = engine.submit(request("live", max_tokens=ENDLESS))
            await first(stream, 2)
            await engine.stop()
            with pytest.raises(EngineDied, match="stopped"):
                await read(stream)
            assert not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids)

    run(test)


@pytest.mark.slow
def test_engines_of_two_ranks_each_answer_and_outlive_the_loss_of_a_rank() -> None:
    sizes = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    with ServerProcess("--device", "cpu", *sizes, "--kv-cache-bytes", "64M") as server:

        def ranks() -> list[psutil.Process]:
            return children("oscine.extensions.parallel.start.rank", psutil.Process(server.pid))

        def answer(number: int) -> str:
            prompt = f"What is {number} + 58?"
            body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0.0}
            return str(server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])

        def count(number: int) -> int:
            body = {"model": MODEL, "prompt": [10 + number] * 70, "max_tokens": 500, "ignore_eos": True}
            return int(server.post("/v1/completions", body)["usage"]["completion_tokens"])

        wait_until(lambda: len(server._engines()) == 2 and len(ranks()) == 2, "four ranks")
        with ThreadPoolExecutor(4) as threads:
            assert "85" in list(threads.map(answer, range(26, 30)))[1]
            counts = [threads.submit(count, number) for number in range(4)]
            server.wait_running(4)
            lost = ranks()[0]
            lost.kill()
            assert [one.result() for one in counts] == [500] * 4
        assert server.metric("oscine:migrations_total") >= 1
        wait_until(lambda: lost.pid not in [one.pid for one in ranks()] and len(ranks()) == 2, "a new rank", 90.0)
        processes = server.processes()
    wait_until(lambda: not any(map(is_alive, processes)), "the end of all processes")


# ---- options ----


@pytest.mark.parametrize(
    ("device", "count", "num_gpus", "devices"),
    [
        ("auto", 2, 0, ["cpu", "cpu"]),
        ("cpu", 2, 8, ["cpu", "cpu"]),
        ("auto", 2, 8, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 2, ["cuda:0", "cuda:1"]),
        ("cuda:2,5", 2, 8, ["cuda:2", "cuda:5"]),
        ("cuda:1,cuda:0", 2, 8, ["cuda:1", "cuda:0"]),
    ],
)
def test_each_engine_and_each_rank_has_a_device(device: str, count: int, num_gpus: int, devices: list[str]) -> None:
    assert devices_of(device, count, 1, num_gpus) == [[one] for one in devices]
    assert devices_of(device, 1, count, num_gpus) == [devices]


def test_the_ranks_of_each_engine_have_devices_of_their_own() -> None:
    config = Config.of({"tensor-parallel-size": 2, "data-parallel-size": 2, "device": "cuda"})
    assert [engine.model.device for engine in engines_of(config, 4)] == ["cuda:0,cuda:1", "cuda:2,cuda:3"]
    assert [
        engine.model.device for engine in engines_of(Config.of({"tensor-parallel-size": 2, "data-parallel-size": 2}), 0)
    ] == ["cpu", "cpu"]
    product = r"--data-parallel-size times --tensor-parallel-size must be at most the number of GPUs \(3\), not 4"
    with pytest.raises(ValueError, match=product):
        engines_of(config, 3)


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("auto", 3, r"--data-parallel-size must be at most the number of GPUs \(2\), not 3"),
        ("cuda:1", 2, r"--device must name as many devices as --data-parallel-size \(2\), not 'cuda:1'"),
        ("cuda:0,1,2", 2, r"--device must name as many devices"),
    ],
)
def test_too_few_devices_are_refused(device: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        devices_of(device, count, 1, 2)
    with pytest.raises(ValueError, match=message.replace("data", "tensor")):
        devices_of(device, 1, count, 2)


def test_engines_on_a_cpu_share_its_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = Config(server=ServerOptions(data_parallel_size=3))
    engines = engines_of(config, 0)
    assert [engine.cache.kv_cache_bytes for engine in engines] == [(1 << 30) // 3] * 3
    assert [engine.num_threads for engine in engines] == [2] * 3
    assert [engine.quiet for engine in engines] == [False, True, True]
    on_gpus = engines_of(config, 3)
    assert [engine.model.device for engine in on_gpus] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {(engine.cache.kv_cache_bytes, engine.num_threads) for engine in on_gpus} == {(None, None)}


@pytest.mark.parametrize(("count", "tokens", "of_each"), [(2, 8192, 4096), (4, 8192, 2048), (4, 1024, 512)])
def test_a_step_of_engines_that_share_experts_is_no_larger_than_one_engines(
    count: int, tokens: int, of_each: int
) -> None:
    scheduler = SchedulerOptions(max_num_seqs=512, max_num_batched_tokens=tokens)
    server = ServerOptions(data_parallel_size=count, enable_expert_parallel=True)
    engines = engines_of(Config(EngineOptions(scheduler=scheduler), server), 0)
    assert [engine.scheduler.max_num_batched_tokens for engine in engines] == [of_each] * count


def test_options_of_a_single_engine_are_refused() -> None:
    peers = PeerOptions(kv_events=True, kv_events_endpoint="tcp://*:5557")
    config = Config(EngineOptions(peers=peers), ServerOptions(data_parallel_size=2))
    with pytest.raises(ValueError, match="--kv-events-config publishes the events of one engine"):
        engines_of(config, 0)


# ---- the server ----


async def stream_texts(url: str, count: int, killer: Callable[[], None]) -> list[str]:
    """Greedy texts of streams that begin together; `killer` is called once all have begun."""
    begun = 0

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        nonlocal begun
        text = ""
        messages: Any = [{"role": "user", "content": f"Question {number}"}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=80, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in answer:
            if not text:
                begun += 1
                if begun == count:
                    killer()
            for choice in chunk.choices:
                text += (choice.delta.content or "") + getattr(choice.delta, "reasoning", "")
        return text

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        return await asyncio.gather(*(one(client, number) for number in range(count)))


def test_the_server_shows_each_engine_outlives_one_and_drains() -> None:
    options = ("--executor", "fake", "--fake-step-s", "0.02", "--data-parallel-size", "2", "--log-level", "warning")
    with ServerProcess(*options) as server:
        engines = server._engines()
        assert len(engines) == 2
        calm = asyncio.run(stream_texts(server.url, 8, lambda: None))
        assert asyncio.run(stream_texts(server.url, 8, engines[0].kill)) == calm

        def seen() -> Any:
            return samples(urllib.request.urlopen(f"{server.url}/metrics").read().decode())

        wait_until(lambda: total(seen(), "oscine:engine_restarts_total") == 1, "a restart")
        wait_until(lambda: total(seen(), "oscine:replica_state", state="ready") == 2, "both engines")
        for name in ("0", "1"):
            assert total(seen(), "oscine:replica_kv_cache_usage_perc", replica=name) == 0
        assert total(seen(), "oscine:migrations_total") >= 1
        assert total(seen(), "oscine:engine_ready") == 1
        texts: list[str] = []
        streaming = threading.Thread(
            target=lambda: texts.extend(asyncio.run(stream_texts(server.url, 8, server.terminate)))
        )
        streaming.start()
        streaming.join(60)
        assert texts == calm
        assert server.exit_code() == 0
        assert not any(engine.is_running() for engine in engines)
