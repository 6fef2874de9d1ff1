"""The Serve deployment "router": the router of the cluster, as an actor.

Its clients ask over ZeroMQ; Serve tells them where. It asks Serve for a first replica where requests wait and none is
there. No request passes through Ray.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.extensions.cluster.ray.names import handle_of
from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.routing.service import RouterService
from oscine.extensions.replicas.spec.deployment import ModelSpec, app_name
from oscine.types import Role

_LOOK_S = 0.2  # between looks for what is missing, or still open


class RouterActor:
    def __init__(self, key: str = "", wire_version: str = "") -> None:
        """`key`, `wire_version`: of the Deployment."""
        self._router = Router(key)
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._service = RouterService(self._router, node, key)
        self._demand = asyncio.create_task(Demand(self._router, wire_version).run())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The models of the deployment file now."""
        self._router.reconfigure(msgspec.convert(user_config["models"], list[ModelSpec]))

    async def check_health(self) -> None:
        """Serve's question, answered as long as the event loop turns; it replaces a router that does not answer."""
        if not self._service.is_listening or self._demand.done():
            raise RuntimeError("the router does not work any more")

    async def address(self) -> str:
        """Where ingresses and replicas ask."""
        return self._service.address

    async def snapshot(self) -> Any:
        """For `oscine cluster status`."""
        return await self._router.snapshot()

    async def __del__(self) -> None:  # Serve's call before it ends the actor
        """Lets requests of ingresses that drain have their places."""
        while self._service.num_open:
            await asyncio.sleep(_LOOK_S)


class Demand:
    """Tells Serve of models and roles that requests wait for and that have no replica.

    A pool without replicas cannot report a load. Serve counts the calls that wait for one, and the autoscaling policy
    sees that count: so one call waits for each pool that is missing. It carries no request.
    """

    def __init__(self, router: Router, wire_version: str) -> None:
        self._router, self._wire_version = router, wire_version
        self._handles: dict[tuple[str, Role], DeploymentHandle[Any]] = {}
        self._calls: dict[tuple[str, Role], asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            for pool in self._router.missing():
                if pool not in self._calls:
                    self._calls[pool] = asyncio.create_task(self._call(pool))
            await asyncio.sleep(_LOOK_S)

    async def _call(self, pool: tuple[str, Role]) -> None:
        model, role = pool
        try:
            with contextlib.suppress(RayError, RayServeException):
                if pool not in self._handles:
                    self._handles[pool] = await asyncio.to_thread(handle_of, role, app_name(model, self._wire_version))
                await self._handles[pool].is_there.remote()
        finally:
            del self._calls[pool]
