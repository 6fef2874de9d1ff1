"""The deployments of the Serve app `oscine`, and where its router listens."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.extensions.replicas.client.router import RouterAway
from oscine.extensions.replicas.spec.deployment import APP

ROUTER, INGRESS = "router", "ingress"


def handle_of(deployment: str, app: str) -> DeploymentHandle[Any]:
    """Blocks. Raises RayServeException where there is no such deployment."""
    try:
        return serve.get_deployment_handle(deployment, app)
    except KeyError as error:
        raise RayServeException(str(error)) from None


_get_router = partial(handle_of, ROUTER, APP)


def router_address(get_handle: Callable[[], DeploymentHandle[Any]] = _get_router) -> Callable[[], Awaitable[str]]:
    """What a RouterClient asks: one call for each life of the router, from any event loop."""
    handles: list[DeploymentHandle[Any]] = []

    async def address() -> str:
        try:
            if not handles:
                handles.append(await asyncio.to_thread(get_handle))
            response = handles[0].address.remote()
            try:
                where: str = await response
            except asyncio.CancelledError:
                response.cancel()  # type: ignore[no-untyped-call]
                raise
        except (RayError, RayServeException) as error:
            raise RouterAway(type(error).__name__) from None
        return where

    return address
