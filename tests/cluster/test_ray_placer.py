"""How calls of a Serve handle fail, and what an ingress is told; with a handle that fails as Ray does."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from oscine.cluster.placement import NoPlace, Place, Placement
from oscine.cluster.ray_placer import RayPlacer
from oscine.cluster.snapshot import ClusterSnapshot
from tests.engine_process.harness import run

PLACEMENT = Placement("r", "model", [b"x" * 16], num_tokens=3, max_tokens=5)
PLACE = Place("a", "tcp://127.0.0.1:1", None, 0, 0.5)


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


def task_error(cause: Exception) -> Exception:
    """As Ray raises what a method of an actor has raised."""
    error: Exception = RayTaskError("place", "a traceback", cause).as_instanceof_cause()  # type: ignore[no-untyped-call]
    return error


def test_a_router_that_died_is_waited_for() -> None:
    async def test() -> None:
        handle = Handle(ActorDiedError(), BackPressureError(1, 1), PLACE)
        assert await RayPlacer(handle).place(PLACEMENT) == PLACE  # type: ignore[arg-type]
        assert handle.calls == [("place", PLACEMENT)] * 3

    run(test)


def test_the_state_of_the_cluster_is_asked_for_in_the_same_way() -> None:
    async def test() -> None:
        handle = Handle(ActorDiedError(), ClusterSnapshot(1.0))
        assert await RayPlacer(handle).snapshot() == ClusterSnapshot(1.0)  # type: ignore[arg-type]
        assert handle.calls == [("snapshot",)] * 2

    run(test)


def test_what_the_router_refuses_comes_as_it_said_it() -> None:
    async def test() -> None:
        refusal = NoPlace("too many wait", retry_after_s=7.0, overloaded=True)
        handle = Handle(task_error(refusal))
        with pytest.raises(NoPlace, match="too many wait") as caught:
            await RayPlacer(handle).describe("model")  # type: ignore[arg-type]
        assert type(caught.value) is NoPlace
        assert (caught.value.retry_after_s, caught.value.overloaded) == (7.0, True)
        assert handle.calls == [("describe", "model")]

    run(test)


def test_a_router_that_stays_away_or_hangs_is_no_place() -> None:
    async def test() -> None:
        for answer, reason in ((ActorDiedError(), "ActorDiedError"), (None, "does not answer")):
            placer = RayPlacer(Handle(answer), absence_s=0.3, answer_s=0.5)  # type: ignore[arg-type]
            with pytest.raises(NoPlace, match=f"the router cannot be reached: .*{reason}") as caught:
                await placer.place(PLACEMENT)
            assert not caught.value.overloaded
            assert caught.value.retry_after_s > 0

    run(test)


def test_a_call_that_nobody_waits_for_is_cancelled() -> None:
    async def test() -> None:
        handle = Handle(None)
        call = asyncio.create_task(RayPlacer(handle).place(PLACEMENT))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [response.cancelled for response in handle.responses] == [True]

    run(test)
