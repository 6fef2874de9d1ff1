"""Brings a Ray cluster to what a deployment says, tells how it is, and takes it down.

Models come first, then the router and the ingress that speak for them. When models go, the order is reversed. Called by
a process that is a client of Ray.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from oscine.extensions.cluster.ray.apps import cluster_app, model_app
from oscine.extensions.cluster.ray.local import ClusterError
from oscine.extensions.cluster.ray.names import INGRESS, ROUTER
from oscine.extensions.replicas.spec.deployment import APP, Deployment, ModelSpec, app_name
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot

logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it tells every handle that is made
FAILURES = (RayError, RayServeException, TimeoutError)  # of calls to a cluster that is in trouble
_POLL_S = 0.2
_TELL_S = 10.0  # that a start takes, before it is told what it waits for
_DOING = {"STARTING": "to start", "STOPPING": "to end"}  # by state of a replica
_CALL_S = 10.0
_REASON = re.compile(r"^(?:\w+\.)*(?:EngineError|ServerError|ValueError): (.+)$", re.MULTILINE)
Note = Callable[[str], None]


def up(deployment: Deployment, *, wait: bool, note: Note) -> None:
    """Raises ClusterError when something cannot start; `note` is told of each step."""
    serve.start(proxy_location="Disabled")
    there = running()
    drain_s = deployment.server.drain_s
    models = {app_name(model.name): model_app(model, deployment) for model in deployment.models}
    front = {APP: cluster_app(deployment)}
    if APP not in there or not wait:
        _run(models | front)
    else:
        _run(models)  # what the ingress says of a model is true only when its replicas are
    if wait:
        waits = [Wait(app_name(model.name), model, model.start_timeout_s + drain_s) for model in deployment.models]
        _wait_running(waits, note)
        if APP in there:
            _run(front)
        longest_s = max(model.start_timeout_s for model in deployment.models) + drain_s
        _wait_running([Wait(APP, None, longest_s)], note)
        _wait_settled(deployment.ingress_replicas, longest_s)
    _delete([name for name in there if name != APP and name not in models], note)


def _run(apps: dict[str, serve.Application]) -> None:
    targets = [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()]
    serve.run_many(targets, wait_for_applications_running=False)


def running() -> dict[str, ApplicationStatusOverview]:
    """Our apps by name."""
    apps = serve.status().applications
    return {name: app for name, app in apps.items() if name == APP or name.startswith(f"{APP}-")}


def down(note: Note) -> None:
    """Ingress first, so that its requests end; then the models."""
    names = running()
    _delete([name for name in names if name == APP], note)
    _delete([name for name in names if name != APP], note)
    if not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]


def _delete(names: list[str], note: Note) -> None:
    for name in names:
        note(f"{name} drains")
        serve.delete(name, _blocking=False)
    while any(name in serve.status().applications for name in names):
        time.sleep(_POLL_S)


class Wait:
    """For one app to run, as long as something moves. `patience_s` is how long nothing may."""

    def __init__(self, name: str, model: ModelSpec | None, patience_s: float) -> None:
        """`model` is that of the app; None for the one of router and ingress."""
        self.name, self._model, self._patience_s = name, model, patience_s
        self._seen: object = None
        self._since_s = time.monotonic()
        self._told = False

    def over(self, app: ApplicationStatusOverview | None, free: Callable[[], dict[str, float]], note: Note) -> bool:
        """Whether it runs now; `note` is told once what a long wait is for, with what Ray has `free`.

        Raises ClusterError when it failed, or will not run.
        """
        if app is not None and app.status == ApplicationStatus.DEPLOY_FAILED:
            raise ClusterError(_reason(self.name, app))
        if app is not None and app.status == ApplicationStatus.RUNNING:
            note(f"{self.name} is ready")
            return True
        seen = app and [_by_state(one) for one in app.deployments.values()]
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if waited_s > self._patience_s:
            raise ClusterError(f"{self.name} is not ready after {self._patience_s:g} s: {self._what(app, free())}")
        if waited_s > _TELL_S and not self._told:
            self._told = True
            note(f"{self.name} waits: {self._what(app, free())}")
        return False

    def _what(self, app: ApplicationStatusOverview | None, free: dict[str, float]) -> str:
        deployments = app.deployments.items() if app is not None else ()
        parts = [
            f"{number} {name} {doing}{self._needs(name) if state == 'STARTING' else ''}"
            for name, one in deployments
            for state, doing in _DOING.items()
            if (number := _by_state(one).get(state))
        ]
        has = ", ".join(f"{free.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
        return f"{', '.join(parts)}; Ray has {has} free" if parts else "Serve has not begun"

    def _needs(self, deployment: str) -> str:
        for role in self._model.roles if self._model is not None else ():
            if deployment in {part.name for part in role.parts}:
                return f" (each takes {role.cpus:g} CPU, {role.gpus:g} GPU)"
        return ""


def _by_state(deployment: DeploymentStatusOverview) -> dict[str, int]:
    """Serve gives the states as plain strings, although its types say otherwise."""
    return dict(deployment.replica_states.items())


def _wait_running(waits: list[Wait], note: Note) -> None:
    while waits:
        apps = serve.status().applications
        waits = [wait for wait in waits if not wait.over(apps.get(wait.name), ray.available_resources, note)]
        time.sleep(_POLL_S)


def _wait_settled(num_ingresses: int, within_s: float) -> None:
    """Any of the ingresses answers: as often as makes it likely that each has."""
    handle, answers = serve.get_deployment_handle(INGRESS, APP), 0
    deadline = time.monotonic() + within_s
    while answers < 2 * num_ingresses - 1:
        pending: list[str] = handle.pending.remote().result(timeout_s=_CALL_S)
        answers = 0 if pending else answers + 1
        if pending and time.monotonic() > deadline:
            raise ClusterError(f"the ingress still waits for {', '.join(pending)} after {within_s:g} s")
        if pending:
            time.sleep(_POLL_S)


def _reason(name: str, app: ApplicationStatusOverview) -> str:
    """Why it does not run: what our own code said, of all the traces that Serve tells. Empty if it does."""
    if app.status == ApplicationStatus.RUNNING:
        return ""
    for text in (app.message, *(deployment.message for deployment in app.deployments.values())):
        found = _REASON.findall(text)
        if found:
            return f"{name}: {found[-1]}"
    return f"{name}: {' '.join(app.message.split())}"


@dataclass(frozen=True, slots=True)
class AppState:
    name: str
    status: str  # of Serve: DEPLOYING, RUNNING, DEPLOY_FAILED, ...
    message: str  # why it is not RUNNING, in one line


@dataclass(frozen=True, slots=True)
class ClusterState:
    apps: list[AppState]
    snapshot: ClusterSnapshot | None  # None while there is no router
    url: str | None  # of the ingress


def state() -> ClusterState:
    apps = [AppState(name, app.status.value, _reason(name, app)) for name, app in running().items()]
    return ClusterState(apps, _ask(ROUTER, "snapshot"), _ask(INGRESS, "url"))


def url() -> str:
    return str(_ask(INGRESS, "url"))


def with_secrets(deployment: Deployment) -> Deployment:
    """Fills in the prefix seed and the key. A running cluster keeps its own.

    Raises ClusterError if these cannot be read, or if the deployment has another key.
    """
    seed, key = secrets.token_hex(16), deployment.key or secrets.token_hex(32)
    if APP in running():
        answer: tuple[str, str] | None = _ask(INGRESS, "secrets")
        if answer is None:
            raise ClusterError(
                "the ingress does not answer, so the cluster's key is unknown: try again, or `down` first"
            )
        seed, key = answer
        if deployment.key not in ("", key):
            raise ClusterError("the cluster runs with another key than OSCINE_CLUSTER_KEY: `oscine cluster down` first")
    return replace(deployment, prefix_seed=deployment.prefix_seed or seed, key=key)


def _ask(deployment: str, method: str) -> Any:
    """None where it does not answer."""
    try:
        return getattr(serve.get_deployment_handle(deployment, APP), method).remote().result(timeout_s=_CALL_S)
    except FAILURES:
        return None
