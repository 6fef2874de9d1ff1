"""The router as the ingress sees it: calls of a Serve handle that outlast the router's own death.

Knows how calls fail in Ray; not how a place is chosen. Calls may come from any event loop: the handle routes on a
thread of its own.
"""

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.cluster.placement import NoPlace, Place, Placement
from oscine.cluster.snapshot import ClusterSnapshot
from oscine.types import EngineInfo

_AGAIN_S = 0.1  # between two tries to reach a router
_RETRY_AFTER_S = 5.0  # what a client is told when there was none


class RayPlacer:
    """Implements Placer."""

    def __init__(self, router: DeploymentHandle[Any], *, absence_s: float = 60.0, answer_s: float = 3600.0) -> None:
        """`absence_s`: how long a call waits for a router that died; `answer_s`: for one that lives.

        A router bounds the wait for a place itself, by what the deployment file says, and Serve replaces one that
        hangs; so the latter is for an answer that got lost.
        """
        self._router, self._absence_s, self._answer_s = router, absence_s, answer_s

    async def place(self, placement: Placement) -> Place:
        place: Place = await self._call("place", placement)
        return place

    async def describe(self, model: str) -> EngineInfo:
        info: EngineInfo = await self._call("describe", model)
        return info

    async def snapshot(self) -> ClusterSnapshot:
        """Raises NoPlace when there is no router."""
        snapshot: ClusterSnapshot = await self._call("snapshot")
        return snapshot

    async def _call(self, method: str, *arguments: object) -> Any:
        """Raises NoPlace, the router's own or one that says that there is no router."""
        timeout = asyncio.timeout(self._answer_s)
        failure: Exception | None = None
        try:
            async with timeout:
                while True:
                    try:
                        return await self._ask(method, *arguments)
                    except (RayError, RayServeException) as error:
                        if failure is None:
                            timeout.reschedule(asyncio.get_running_loop().time() + self._absence_s)
                        failure = error
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            reason = type(failure).__name__ if failure is not None else "it does not answer"
            message = f"the router cannot be reached: {reason}"
            raise NoPlace(message, retry_after_s=_RETRY_AFTER_S, overloaded=False) from None

    async def _ask(self, method: str, *arguments: object) -> Any:
        response = getattr(self._router, method).remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
