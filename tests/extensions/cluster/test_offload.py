"""Offloaded pages of several engines behind one API process: they share a folder, and lockstep goes on."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.extensions.replicas.data_parallel import DataParallelEngine
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from tests.engine_process.harness import read, request, tokens
from tests.extensions.cluster.test_data_parallel import parallel
from tests.waiting import until

PATIENCE_S = 300.0  # for four engines to start
PROMPTS = [[(40 * i + 7 * j) % 1000 for j in range(200)] for i in range(12)]
ONE = EngineOptions(
    ModelOptions(device="cpu", max_model_len=512),
    CacheOptions(16, 4 << 20),
    SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=64),
    quiet=True,
    num_threads=1,
)


def offloading(folder: Path) -> EngineOptions:
    return replace(ONE, cache=replace(ONE.cache, kv_offload_bytes=2 << 20, kv_offload_dir=str(folder)))


async def answers(engine: DataParallelEngine, turn: int) -> list[list[int]]:
    requests = [request(f"{turn} {i}", prompt, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    return [tokens(found) for found in await asyncio.gather(*(read(engine.submit(one)) for one in requests))]


@pytest.mark.slow
@pytest.mark.parametrize("share_experts", [False, True])
def test_engines_share_a_folder_and_find_their_pages_after_a_restart(tmp_path: Path, share_experts: bool) -> None:
    async def test() -> None:
        expected: list[list[int]] = []  # computed; later ones come from pages
        for life in range(2):
            async with parallel(*[offloading(tmp_path)] * 2, share_experts=share_experts) as engine:
                for turn in range(2):
                    found = await answers(engine, turn)
                    expected = expected or found
                    assert found == expected
                    for one in engine.engines.values():
                        await until(lambda one=one: one.stats.num_running == 0 and one.stats.offload_disk_pages > 0)
                stats = engine.stats
                assert stats.offload_host_hits + stats.offload_disk_hits > 0, life
                assert stats.offload_disk_failures == 0
        assert len(list(tmp_path.glob("*/*"))) == 2  # a folder for each

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
