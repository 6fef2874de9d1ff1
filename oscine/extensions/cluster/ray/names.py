"""The deployments of router and ingress, and where the router listens."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.extensions.replicas.client.router import RouterAway
from oscine.extensions.replicas.spec.deployment import front_name

ROUTER, INGRESS = "router", "ingress"


def handle_of(deployment: str, app: str) -> DeploymentHandle[Any]:
    """Blocks. Raises RayServeException where there is no such deployment."""
    try:
        return serve.get_deployment_handle(deployment, app)
    except KeyError as error:
        raise RayServeException(str(error)) from None


def router_of(wire_version: str = "") -> Callable[[], DeploymentHandle[Any]]:
    """What finds the router of replicas with this version; see Deployment."""
    return partial(handle_of, ROUTER, front_name(wire_version))


def router_address(get_handle: Callable[[], DeploymentHandle[Any]]) -> Callable[[], Awaitable[str]]:
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
