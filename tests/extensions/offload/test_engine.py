"""Evicted pages of real engine processes: they survive kill -9, and a full disk ends nothing."""

import os
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from oscine.engine.build import build_engine
from oscine.engine.core.offline import generate
from oscine.engine.process.client import EngineClient
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, OptionError, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams
from tests.engine_process.harness import options, read, request, run, serving, tokens
from tests.tiny import SCRIPTED
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines


def prompt(start: int, num_tokens: int = 500) -> list[int]:
    return [(start + 7 * i) % 256 for i in range(num_tokens)]


def offloading(model: Path, folder: Path, disk_bytes: int = 1 << 24) -> EngineOptions:
    """A fake engine whose cache holds two prompts, and that checks what its pages hold."""
    page_bytes = sum(group.page_bytes for group in SCRIPTED.kv_groups(16, "uint8"))
    cache = CacheOptions(16, 70 * page_bytes, kv_offload_bytes=30 * page_bytes, kv_offload_dir=str(folder))
    found = options(model, max_num_seqs=2, max_num_batched_tokens=128)
    limited = replace(found.model, max_model_len=1024)
    return replace(found, model=limited, cache=replace(cache, kv_offload_disk_bytes=disk_bytes), quiet=True)


def test_pages_survive_kill_9_at_any_moment(model_folder: Path, tmp_path: Path) -> None:
    """Before and after the kill, requests are sent until a prompt is read from a file.

    Files are written in the background. Measured speeds decide whether a prompt is read or computed.
    """

    async def ask_until_a_file_is_read(client: EngineClient) -> None:
        for turn in count():
            for i in range(6):
                outputs = await read(client.submit(request(f"{client.restarts} {turn} {i}", prompt(i))))
                assert outputs[-1].error is None
            if client.stats.offload_disk_hits:
                return

    async def test() -> None:
        async with serving(offloading(model_folder, tmp_path)) as client:
            await ask_until_a_file_is_read(client)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)  # possibly in the middle of a write
            await until(lambda: client.restarts == 1 and client.state == "ready")
            await until(lambda: client.stats.offload_disk_pages > 0, "pages of the first engine")
            assert client.stats.prefix_queries == 0, "no request yet, so the first engine wrote these pages"
            await ask_until_a_file_is_read(client)
            found = client.stats
            assert found.prefix_hits > 0
            assert found.non_finite == found.offload_disk_failures == 0

    run(test)


def test_files_keep_to_their_limit_and_an_engine_that_stops_leaves_none_half_written(
    model_folder: Path, tmp_path: Path
) -> None:
    limit = 1 << 19

    async def test() -> None:
        for life in range(2):
            async with serving(offloading(model_folder, tmp_path, limit)) as client:
                for i in range(8):
                    outputs = await read(client.submit(request(f"{i}", prompt(100 * life + i, 300))))
                    assert outputs[-1].error is None
                await until(lambda client=client: client.stats.offload_disk_pages > 0)
            sizes = [path.stat().st_size for path in tmp_path.rglob("*.pages")]
            assert 0 < sum(sizes) <= limit
            assert not list(tmp_path.rglob("*.part"))

    run(test)


def test_options_that_need_others_say_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--kv-offload-dir needs --kv-offload-bytes"):
        CacheOptions(kv_offload_dir=str(tmp_path))
    with pytest.raises(OptionError, match=r"--kv-offload-bytes .*--no-prefix-caching"):
        CacheOptions(kv_offload_bytes=1 << 20, prefix_caching=False)


@pytest.mark.slow
def test_greedy_tokens_are_the_same_bit_for_bit_through_eviction_return_and_restart(tmp_path: Path) -> None:
    """The embedded model; its pages are compared by the logprobs of what follows."""

    def answers(offload: bool) -> list[tuple[list[int], list[float]]]:
        cache = CacheOptions(16, 6 << 20)
        if offload:
            cache = replace(cache, kv_offload_bytes=4 << 20, kv_offload_dir=str(tmp_path))
        scheduler = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=256)
        asked = EngineOptions(ModelOptions(device="cpu", max_model_len=1024), cache, scheduler, quiet=True)
        engine = build_engine(asked)
        found, sessions = [], [prompt(i, 300) for i in range(6)]
        for turn in range(2):
            for i, known in enumerate(sessions):
                sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=0)
                [outputs] = generate(engine.loop, [GenerationRequest(f"{turn} {i}", list(known), sampling)]).values()
                found.append((tokens(outputs), [one.logprob for output in outputs for one in output.logprobs or []]))
                known += tokens(outputs) + prompt(turn, 40)
        if offload:
            assert engine.loop.stats().offload_disk_hits + engine.loop.stats().offload_host_hits > 0
            engine.flush(10.0)
        return found

    without = answers(offload=False)
    assert answers(offload=True) == without
    assert answers(offload=True) == without  # after a restart: even the first turns come from files
