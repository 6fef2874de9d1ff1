"""Runs the work of a request until it is done or the client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from oscine.api.common.asgi import ClientLeftError, Receive

T = TypeVar("T")

KEEP_ALIVE_S = 10.0  # an idle stream gets a comment after this long, and before twice as long


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def result_while_connected(receive: Receive | None, work: asyncio.Future[T]) -> T:
    """The result of `work`, awaited before a response has begun. Without `receive`, the client is not watched. Raises
    what `work` raises, and ClientLeftError if the client leaves first.
    """
    if receive is None:
        return await work
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientLeftError
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


async def run_while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, None],
    *,
    on_idle: Callable[[float], Awaitable[None]] | None = None,
    idle_s: float = KEEP_ALIVE_S,
) -> bool:
    """Runs `work` after the request body has been read, and cancels it at once when the client disconnects. Returns
    whether the work completed. Raises its exception, and CancelledError if another task cancelled it. Every idle_s,
    `on_idle(idle_s)` is called; there is no timer and no task per event.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        while not (await asyncio.wait((task, gone), timeout=idle_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if on_idle is not None:
                await on_idle(idle_s)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            return False
        await task
        return True
    finally:
        gone.cancel()
        task.cancel()
