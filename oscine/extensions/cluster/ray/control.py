"""Brings a Ray cluster to what a deployment says, tells how it is, and takes it down.

Models come first, then the router and the ingress that speak for them. When models go, the order is reversed. Called by
a process that is a client of Ray.

Where a release has other messages than the one that runs, all of it starts beside the other one, and takes over.
"""

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from oscine.extensions.cluster.ray.apps import cluster_app, model_app
from oscine.extensions.cluster.ray.local import ClusterError, machines
from oscine.extensions.cluster.ray.names import INGRESS, ROUTER
from oscine.extensions.replicas.spec.deployment import APP, Deployment, ModelSpec, app_name, front_name
from oscine.extensions.replicas.spec.fit import misfit
from oscine.extensions.replicas.spec.router_messages import own_version
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot

logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it tells every handle that is made
FAILURES = (RayError, RayServeException, TimeoutError)  # of calls to a cluster that is in trouble
_POLL_S = 0.2
_TELL_S = 10.0  # that a start takes, before it is told what it waits for
_DOING = {"STARTING": "to start", "STOPPING": "to end"}  # by state of a replica
_CALL_S = 10.0
_LISTEN_WITHIN_S = 60.0  # of an ingress that shares its port with one that runs
_REASON = re.compile(r"^(?:\w+\.)*(?:EngineError|ServerError|OptionError|ValueError): (.+)$", re.MULTILINE)
Note = Callable[[str], None]


def up(deployment: Deployment, *, wait: bool, note: Note) -> None:
    """Raises ClusterError when something cannot start; `note` is told of each step."""
    serve.start(proxy_location="Disabled")
    there = running()
    deployment = replace(deployment, wire_version=own_version())
    version = deployment.wire_version
    wanted = {front_name(version), *(app_name(one.name, version) for one in deployment.models)}
    takes_over = _serves_beside(wanted, there)
    if takes_over:
        if not wait:
            raise ClusterError(
                "the release that runs has other messages, so it is replaced in steps: `up` must wait for them"
            )
        if not wanted & set(there):  # else an `up` that was ended early has begun
            _check_room(deployment)
        note("the release that runs has other messages: this one starts beside it, and takes over when it is ready")
    try:
        _bring(deployment, there, wait=wait, note=note)
    except BaseException:
        if takes_over:
            _take_down([name for name in running() if name in wanted], note)
        raise
    _take_down([name for name in there if name not in wanted], note)


def _serves_beside(wanted: Collection[str], there: Mapping[str, ApplicationStatusOverview]) -> bool:
    """Whether another release than that of the apps `wanted` serves, and goes on if these are taken down."""
    others = [name for name in fronts(there) if name not in wanted]
    return any(there[name].status != ApplicationStatus.DELETING for name in others)


def _bring(deployment: Deployment, there: Collection[str], *, wait: bool, note: Note) -> None:
    """`there`: the apps that run."""
    drain_s, version = deployment.server.drain_s, deployment.wire_version
    models = {app_name(model.name, version): model_app(model, deployment) for model in deployment.models}
    name, is_first = front_name(version), not fronts(there)
    front = {name: cluster_app(deployment, listen_within_s=0.0 if is_first else _LISTEN_WITHIN_S)}
    if is_first or not wait:
        _run(models | front)
    else:
        _run(models)  # what the ingress says of a model is true only when its replicas are
    if wait:
        waits = [
            Wait(app, model, model.start_timeout_s + drain_s)
            for app, model in zip(models, deployment.models, strict=True)
        ]
        _wait_running(waits, note)
        if not is_first:
            _run(front)
        longest_s = max(model.start_timeout_s for model in deployment.models) + drain_s
        _wait_running([Wait(name, None, longest_s)], note)
        _wait_settled(name, deployment.ingress_replicas, longest_s)


def _check_room(deployment: Deployment) -> None:
    """Raises ClusterError where this release cannot run beside another one."""
    reason = misfit(deployment, machines(free=True), free=True)
    if reason is not None:
        raise ClusterError(
            f"the release that runs has other messages, so replicas of both must have room at once: {reason}. "
            "`oscine cluster down` makes room, and ends the service meanwhile"
        )


def _run(apps: dict[str, serve.Application]) -> None:
    targets = [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()]
    serve.run_many(targets, wait_for_applications_running=False)


def running() -> dict[str, ApplicationStatusOverview]:
    """Our apps by name."""
    apps = serve.status().applications
    return {name: app for name, app in apps.items() if re.split("[-.]", name)[0] == APP}


def fronts(apps: Iterable[str]) -> list[str]:
    """Of these apps, those of router and ingress; while a release takes over from another one there are two."""
    return [name for name in apps if name == APP or name.startswith(f"{APP}.")]


def shown(app: str) -> str:
    """The name for users: that of a release with the same messages is not marked as such."""
    return app.removesuffix(front_name(own_version()).removeprefix(APP))


def down(note: Note) -> None:
    _take_down(list(running()), note)
    if not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]


def _take_down(names: list[str], note: Note) -> None:
    """Ingresses first, so that their requests end; then the models."""
    _delete(fronts(names), note)
    _delete([name for name in names if name not in fronts(names)], note)


def _delete(names: list[str], note: Note) -> None:
    for name in names:
        note(f"{shown(name)} drains")
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
            note(f"{shown(self.name)} is ready")
            return True
        seen = app and [_by_state(one) for one in app.deployments.values()]
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if waited_s > self._patience_s:
            raise ClusterError(
                f"{shown(self.name)} is not ready after {self._patience_s:g} s: {self._what(app, free())}"
            )
        if waited_s > _TELL_S and not self._told:
            self._told = True
            note(f"{shown(self.name)} waits: {self._what(app, free())}")
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
                bound = f", {role.max_replicas_per_node} per machine at most" if role.max_replicas_per_node else ""
                return f" (each takes {role.cpus:g} CPU, {role.gpus:g} GPU{bound})"
        return ""


def _by_state(deployment: DeploymentStatusOverview) -> dict[str, int]:
    """Serve gives the states as plain strings, although its types say otherwise."""
    return dict(deployment.replica_states.items())


def _wait_running(waits: list[Wait], note: Note) -> None:
    while waits:
        apps = serve.status().applications
        waits = [wait for wait in waits if not wait.over(apps.get(wait.name), ray.available_resources, note)]
        time.sleep(_POLL_S)


def _wait_settled(front: str, num_ingresses: int, within_s: float) -> None:
    """Any of the ingresses answers: as often as makes it likely that each has."""
    handle, answers = serve.get_deployment_handle(INGRESS, front), 0
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
            return f"{shown(name)}: {found[-1]}"
    return f"{shown(name)}: {' '.join(app.message.split())}"


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
    apps = [AppState(shown(name), app.status.value, _reason(name, app)) for name, app in running().items()]
    return ClusterState(apps, _ask(ROUTER, "snapshot"), _ask(INGRESS, "url"))


def url() -> str:
    return str(_ask(INGRESS, "url"))


def with_secrets(deployment: Deployment) -> Deployment:
    """Fills in the prefix seed and the key. A running cluster keeps its own.

    Raises ClusterError if these cannot be read, or if the deployment has another key.
    """
    seed, key = secrets.token_hex(16), deployment.key or secrets.token_hex(32)
    if fronts(running()):
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
    """None where none answers. Of two releases, the one with the messages of this process is asked first."""
    own = front_name(own_version())
    for front in sorted(fronts(running()), key=lambda name: name != own):
        with contextlib.suppress(*FAILURES):
            return getattr(serve.get_deployment_handle(deployment, front), method).remote().result(timeout_s=_CALL_S)
    return None
