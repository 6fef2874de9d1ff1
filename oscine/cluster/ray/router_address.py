"""Where the router listens: what a Serve handle says, and how its calls fail in Ray. Nothing else is asked by it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.cluster.client.router import RouterAway


def router_address(router: DeploymentHandle[Any]) -> Callable[[], Awaitable[str]]:
    """What a RouterClient asks. It may do so on any event loop: the handle routes on a thread of its own."""

    async def address() -> str:
        response = router.address.remote()
        try:
            where: str = await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except (RayError, RayServeException) as error:
            raise RouterAway(type(error).__name__) from None
        return where

    return address
