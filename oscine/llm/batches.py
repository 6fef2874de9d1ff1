"""Many requests at once: as many as keep the engine full, with results in order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")
Bar = Any  # of tqdm


def progress_bar(total: int, wanted: bool | None) -> Bar:
    """`wanted`: None shows it in terminals and notebooks."""
    return tqdm(total=total, disable=None if wanted is None else not wanted, unit=" answers", dynamic_ncols=True)


async def answer_all(
    requests: Sequence[Callable[[], Awaitable[T]]], at_once: int, bar: Bar, *, return_exceptions: bool
) -> list[T]:
    """The first error ends all, unless `return_exceptions` puts errors among the results."""
    results: list[Any] = [None] * len(requests)
    todo = iter(enumerate(requests))

    async def take_turns() -> None:
        for i, request in todo:
            try:
                results[i] = await request()
            except Exception as error:
                if not return_exceptions:
                    error.add_note(f"at index {i} of the batch")
                    raise
                results[i] = error
            bar.update()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(requests))):
                group.create_task(take_turns())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        bar.close()
    return results
