"""Brings a Ray cluster to what a deployment says, tells how it is, and takes it down.

Knows the order of things: models first, then the router and ingress that speak for them; the other way round when
models go. Called by a process that is a client of Ray.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from oscine.cluster.apps import INGRESS, ROUTER, cluster_app, model_app
from oscine.cluster.deployment import APP, Deployment, app_name
from oscine.cluster.snapshot import ClusterSnapshot

logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it tells every handle that is made
FAILURES = (RayError, RayServeException, TimeoutError)  # of calls to a cluster that is in trouble
_POLL_S = 0.2
_CALL_S = 10.0
_REASON = re.compile(r"^(?:\w+\.)*(?:EngineError|ServerError|ValueError): (.+)$", re.MULTILINE)
Note = Callable[[str], None]


class ControlError(Exception):
    """One line."""


def up(deployment: Deployment, *, wait: bool, note: Note) -> None:
    """Raises ControlError when something cannot start; `note` is told of each step."""
    serve.start(proxy_location="Disabled")
    there = running()
    seed, drain_s = deployment.prefix_seed, deployment.server.drain_s
    models = {app_name(model.name): model_app(model, seed, drain_s) for model in deployment.models}
    front = {APP: cluster_app(deployment)}
    if APP not in there or not wait:
        _run(models | front)
    else:
        _run(models)  # what the ingress says of a model is true only when its replicas are
    if wait:
        _wait_running(list(models), note)
        if APP in there:
            _run(front)
        _wait_running([APP], note)
        _wait_settled(deployment.ingress_replicas)
    _delete([name for name in there if name != APP and name not in models], note)


def _run(apps: dict[str, serve.Application]) -> None:
    targets = [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()]
    serve.run_many(targets, wait_for_applications_running=False)


def running() -> list[str]:
    """The names of our apps."""
    return list(_ours())


def _ours() -> dict[str, ApplicationStatusOverview]:
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


def _wait_running(names: list[str], note: Note) -> None:
    waiting = names
    while waiting:
        apps = serve.status().applications
        for name in waiting:
            if name in apps and apps[name].status == ApplicationStatus.DEPLOY_FAILED:
                raise ControlError(_reason(name, apps[name]))
        ready = [name for name in waiting if name in apps and apps[name].status == ApplicationStatus.RUNNING]
        for name in ready:
            note(f"{name} is ready")
        waiting = [name for name in waiting if name not in ready]
        time.sleep(_POLL_S)


def _wait_settled(num_ingresses: int) -> None:
    """Any of the ingresses answers: as often as makes it likely that each has."""
    handle, answers = serve.get_deployment_handle(INGRESS, APP), 0
    while answers < 2 * num_ingresses - 1:
        answers = answers + 1 if handle.settled.remote().result(timeout_s=_CALL_S) else 0
        if not answers:
            time.sleep(_POLL_S)


def _reason(name: str, app: ApplicationStatusOverview) -> str:
    """What our own code said, of all the traces that Serve tells."""
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
    apps = [AppState(name, app.status.value, _trouble(name, app)) for name, app in _ours().items()]
    known = _ask(ROUTER, "snapshot")
    return ClusterState(apps, known, _ask(INGRESS, "url"))


def url() -> str:
    return str(_ask(INGRESS, "url"))


def prefix_seed() -> str | None:
    """Of the cluster that runs: its engines keep it, whatever else changes. Raises ControlError if it cannot be had."""
    if APP not in running():
        return None
    answer: str | None = _ask(INGRESS, "prefix_seed")
    if not answer:
        raise ControlError(
            "the ingress does not answer, so the prefix-seed is unknown: try again, or give it in the file"
        )
    return answer


def _trouble(name: str, app: ApplicationStatusOverview) -> str:
    return "" if app.status == ApplicationStatus.RUNNING else _reason(name, app)


def _ask(deployment: str, method: str) -> Any:
    """None where it does not answer."""
    try:
        return getattr(serve.get_deployment_handle(deployment, APP), method).remote().result(timeout_s=_CALL_S)
    except FAILURES:
        return None
