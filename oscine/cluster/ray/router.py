"""The Serve deployment "router": places the requests of every model, and says how the cluster does.

Ingresses ask over ZeroMQ, which is RouterService's affair; Serve only tells them where. Knows Serve's handles; the
policy is ModelRouter's. Nothing is stored: a router that is started again learns of replicas from Serve, of their pages
by replay, and of their load from their next report.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from oscine.cluster.routing.fleet import Fleet, fleet_of
from oscine.cluster.routing.model_router import ModelRouter
from oscine.cluster.routing.service import RouterService
from oscine.cluster.spec.model_route import ModelRoute, RouterConfig
from oscine.cluster.spec.placement import Accepted, NoPlace, Place, Placement
from oscine.cluster.spec.snapshot import ClusterSnapshot
from oscine.types import EngineInfo

_LOOK_S = 0.05  # between looks for what is waited for
_AGAIN_S = 5.0  # where a model is not deployed


class Router:
    """Implements RouterPolicy; every method runs on one event loop."""

    def __init__(self, key: str = "") -> None:
        """`key`: the cluster's."""
        self._key = key
        self._routers: dict[str, ModelRouter] = {}
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._service = RouterService(self, node, key)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The models of the deployment file now; requests of the others find no place any more."""
        config = msgspec.convert(user_config, RouterConfig)
        routers: dict[str, ModelRouter] = {}
        for route in config.models:
            router = self._routers.get(route.model)
            if router is not None and _deployments(router.route) == _deployments(route):
                router.reconfigure(route)
            else:
                router = _model_router(route, self._key)
            routers[route.model] = router
        self._routers = routers

    async def check_health(self) -> None:
        """Serve's question, answered as long as the event loop turns; it replaces a router that does not answer."""
        if not self._service.is_listening:
            raise RuntimeError("the router does not listen any more")

    async def address(self) -> str:
        """Where ingresses ask."""
        return self._service.address

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        return await self._router(placement.model).place(placement)

    async def describe(self, model: str) -> EngineInfo:
        """Of any replica of the model, once one was ready. Raises NoPlace when it cannot be served."""
        router = self._router(model)
        try:
            async with asyncio.timeout(router.route.start_timeout_s):
                if router.generate.info is None and not len(router.generate):
                    await router.wake()
                while router.generate.info is None:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise NoPlace(f"no replica of {model} is ready", retry_after_s=_AGAIN_S, overloaded=False) from None
        return router.generate.info

    async def snapshot(self) -> ClusterSnapshot:
        routers = self._routers.values()
        fleets = [fleet for router in routers for fleet in (router.generate, router.prefill) if fleet is not None]
        return ClusterSnapshot(
            time.time(),
            replicas=[replica for fleet in fleets for replica in fleet.snapshot()],
            routers=[router.counters for router in routers],
            queued={router.route.model: router.num_queued for router in routers},
        )

    async def __del__(self) -> None:  # Serve's call before it ends the actor
        """Lets requests of ingresses that drain have their places."""
        while self._service.num_open:
            await asyncio.sleep(_LOOK_S)

    def _router(self, model: str) -> ModelRouter:
        router = self._routers.get(model)
        if router is None:
            raise NoPlace(f"the model {model!r} is not deployed", retry_after_s=_AGAIN_S, overloaded=False)
        return router


def _deployments(route: ModelRoute) -> tuple[str, str, str | None]:
    return route.app, route.generate, route.prefill


def _model_router(route: ModelRoute, key: str) -> ModelRouter:
    handle, generate = _follow(route.app, route.generate, key)
    prefill_handle, prefill = _follow(route.app, route.prefill, key) if route.prefill is not None else (None, None)

    async def admit(placement: Placement) -> Accepted | None:
        """Serve's router asks the replicas in the order of the fleet's ranking."""
        response = handle.admit.remote(placement)
        try:
            accepted: Accepted | None = await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except RayActorError:  # it died with the answer
            return None
        except (BackPressureError, DeploymentUnavailableError) as error:
            message = f"{route.model} cannot be reached: {type(error).__name__}"
            raise NoPlace(message, retry_after_s=_AGAIN_S, overloaded=False) from None
        return accepted

    router = ModelRouter(route, generate, prefill, admit)
    if prefill_handle is not None and prefill is not None:
        router.wake_prefill = _waker(prefill_handle, prefill, f"wake-prefill-{route.model}")
    return router


def _waker(handle: DeploymentHandle[Any], fleet: Fleet, name: str) -> Callable[[], None]:
    """Has Serve start a first replica: it does so for a call that waits. One call at a time."""
    calls: set[asyncio.Task[None]] = set()

    async def call() -> None:
        with contextlib.suppress(RayError, RayServeException):
            await handle.admit.remote(Placement(name, "", [], num_tokens=0, max_tokens=0))
        fleet.withdraw(name)

    def wake() -> None:
        if not calls:
            task = asyncio.create_task(call())
            calls.add(task)
            task.add_done_callback(calls.discard)

    return wake


def _follow(app: str, deployment: str, key: str) -> tuple[DeploymentHandle[Any], Fleet]:
    """A handle that routes on this event loop, and what its request router knows: from now on it learns of replicas.

    The deployment need not be there yet.
    """
    fleet = fleet_of(app, deployment)
    fleet.key = key
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, app, _check_exists=False)
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
    return handle, fleet
