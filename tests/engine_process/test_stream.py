"""RequestStream by itself: one wake-up for all outputs that have arrived, and one end."""

import asyncio

import pytest

from oscine.engine.wire.stream import EngineDied, RequestStream
from oscine.types import GenerationOutput

from .harness import run


def test_what_arrives_together_is_read_together() -> None:
    async def test() -> None:
        stream = RequestStream("a", cancel=lambda _: pytest.fail("a stream that ended is not cancelled"))
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        for token in range(3):
            stream.put(GenerationOutput("a", [token]))
        assert [output.token_ids for output in await reading] == [[0], [1], [2]]
        stream.put(GenerationOutput("a", [3], finish_reason="stop"))
        assert [output.token_ids for output in await anext(stream)] == [[3]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream.close()

    run(test)


def test_an_error_comes_after_what_had_arrived() -> None:
    async def test() -> None:
        stream = RequestStream("a", cancel=lambda _: pytest.fail("a stream that failed is not cancelled"))
        stream.put(GenerationOutput("a", [1]))
        stream.fail(EngineDied("gone"))
        assert len(await anext(stream)) == 1
        with pytest.raises(EngineDied, match="gone"):
            await anext(stream)
        stream.close()

    run(test)


def test_a_reader_that_leaves_or_is_cancelled_cancels_the_request_once() -> None:
    async def test() -> None:
        cancelled: list[str] = []
        stream = RequestStream("a", cancelled.append)

        async def read() -> None:
            async with stream:
                await anext(stream)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        stream.close()
        assert cancelled == ["a"]

    run(test)
