"""Real engine processes, driven as the API drives them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from oscine.engine.process.client import Engine, EngineClient, RequestStream
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.waiting import PATIENCE

AnyEngine = TypeVar("AnyEngine", bound=Engine)
PATIENCE_S = 120.0 * PATIENCE  # of a whole test; only ends one that fails


def options(folder: Path, executor: str = "fake", fake_step_s: float = 0.0, **scheduler: Any) -> EngineOptions:
    return EngineOptions(
        model=ModelOptions(model=str(folder)),
        cache=CacheOptions(kv_cache_bytes=1 << 24),
        scheduler=SchedulerOptions(**{"max_num_seqs": 8, "max_num_batched_tokens": 256, **scheduler}),
        executor=executor,  # type: ignore[arg-type]
        fake_step_s=fake_step_s,
    )


def request(name: str, prompt: list[int] | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt or [1, 2, 3], SamplingParams(**{"max_tokens": 8, **sampling}))


@asynccontextmanager
async def running(client: AnyEngine) -> AsyncIterator[AnyEngine]:
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()


def serving(options: EngineOptions) -> AbstractAsyncContextManager[EngineClient]:
    return running(EngineClient(options))


async def read(stream: RequestStream) -> list[GenerationOutput]:
    async with stream:
        return [output async for outputs in stream for output in outputs]


def tokens(outputs: list[GenerationOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def patient() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(patient())
