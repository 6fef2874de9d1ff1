"""Failing calls of a Serve handle, and the resulting errors in an ingress. The handle fails as Ray's does."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from oscine.extensions.cluster.ray.names import router_address
from oscine.extensions.replicas.client.router import _WHERE_S, RouterClient
from oscine.extensions.replicas.spec.placement import NoPlace
from tests import clock
from tests.engine_process.harness import run
from tests.extensions.cluster.scripted_router import PLACE, PLACEMENT, ScriptedRouter, served
from tests.waiting import until


class Response:
    """As a DeploymentResponse: cancelling is asked for, and seen by whoever awaits."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._answer().__await__())
        except asyncio.CancelledError:
            if self.cancelled:
                raise RequestCancelledError("r") from None
            raise

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Each call gets the next answer: an exception, a value, or None for one that never comes."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.calls: list[tuple[object, ...]] = []
        self.responses: list[Response] = []

    def __getattr__(self, method: str) -> "Handle":
        self.method = method
        return self

    def remote(self, *arguments: object) -> Response:
        self.calls.append((self.method, *arguments))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        async def come() -> Any:
            if answer is None:
                await asyncio.sleep(3600)
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.responses.append(Response(come))
        return self.responses[-1]


def asking(handle: Handle, **limits: float) -> RouterClient:
    return RouterClient(router_address(lambda: handle), **limits)  # type: ignore[arg-type,return-value]


def task_error(cause: Exception) -> Exception:
    """As Ray raises what a method of an actor has raised."""
    error: Exception = RayTaskError("address", "a traceback", cause).as_instanceof_cause()  # type: ignore[no-untyped-call]
    return error


def test_a_router_that_died_is_waited_for() -> None:
    async def test() -> None:
        async with served(ScriptedRouter()) as service:
            failures = (ActorDiedError(), BackPressureError(1, 1), task_error(ValueError("no address")))
            handle = Handle(*failures, service.address)
            client = asking(handle)
            assert await client.place(PLACEMENT) == PLACE
            assert await client.place(PLACEMENT) == PLACE
            assert handle.calls == [("address",)] * 4, "once it is known, Serve is left alone"
            client.close()

    run(test)


def test_a_router_that_stays_away_or_hangs_is_no_place() -> None:
    async def test() -> None:
        for answer, reason in ((ActorDiedError(), "ActorDiedError"), (None, "it does not answer")):
            handle = Handle(answer)
            client = asking(handle, absence_s=60)
            asked = asyncio.create_task(client.place(PLACEMENT))
            await until(lambda: bool(handle.calls) and client._away == reason)  # noqa: B023
            clock.pass_time(60)
            with pytest.raises(NoPlace, match=f"the router cannot be reached: {reason}") as caught:
                await asked
            assert not caught.value.overloaded
            assert caught.value.retry_after_s > 0
            client.close()

    clock.run(test())


def test_a_call_that_takes_too_long_is_cancelled_and_made_again() -> None:
    async def test() -> None:
        async with served(ScriptedRouter()) as service:
            handle = Handle(None, service.address)
            client = asking(handle)
            asked = asyncio.create_task(client.place(PLACEMENT))
            await until(lambda: bool(handle.calls))
            clock.pass_time(_WHERE_S)
            assert await asked == PLACE
            assert [response.cancelled for response in handle.responses] == [True, False]
            client.close()

    clock.run(test())


def test_all_that_wait_share_one_call() -> None:
    async def test() -> None:
        async with served(ScriptedRouter()) as service:
            handle = Handle(ActorDiedError(), service.address)
            client = asking(handle)
            asked = [asyncio.create_task(client.place(PLACEMENT)) for _ in range(8)]
            await until(lambda: bool(handle.calls))
            asked.pop(0).cancel()  # the one that made it
            assert await asyncio.gather(*asked) == [PLACE] * 7
            assert len(handle.calls) == 2
            client.close()

    run(test)
