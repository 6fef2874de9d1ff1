"""A cluster for the time of a benchmark, on a Ray of its own or on the machines of another one, and its processes."""

import json
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from oscine.extensions.cluster.ray import local
from oscine.extensions.replicas.spec.deployment import Deployment

OTHER_RAY = "BENCHMARK_RAY"
_NUM_CPUS = 64  # that Ray may assign: more than the machine has, so that Ray never refuses an actor


class Actor(NamedTuple):
    """An actor of Ray Serve."""

    kind: str  # ingress, router, aggregated, prefill or decode
    machine: str  # Ray's name of it
    pid: int  # there


class Cluster:
    """Context manager: the cluster and its models are ready. Nothing is left of it afterwards. The process becomes a
    client of its Ray, so there is one cluster per process.

    With BENCHMARK_RAY in the environment, the address of a Ray on which no cluster runs, it is on these machines: at
    most one replica of a role on each, and ingresses that others reach. Else this machine gets a Ray for it.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._ray: local.LocalRay | None = None
        self._agents: dict[str, Any] = {}  # by machine

    def __enter__(self) -> "Cluster":
        address = os.environ.get(OTHER_RAY)
        if address:
            local.connect(address)
            from oscine.extensions.cluster.ray import control  # Ray is imported when its surroundings are set

            if control.running():
                raise SystemExit(f"a cluster runs on the Ray at {address}: take it down first")
        else:
            self._ray = local.start(_NUM_CPUS, 0)
        try:
            if self._ray is not None:
                self._ray.connect()
            from oscine.extensions.cluster.ray import control

            self.up(self._deployment)
            self._agents = _agents()
            self.url = control.url()
        except BaseException:
            self._end()
            raise
        self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def up(self, deployment: Deployment) -> None:
        """Starts it or updates it, and waits until it is ready."""
        from oscine.extensions.cluster.ray import control

        whole = deployment if self._ray else control.with_secrets(_spread(deployment))
        control.up(whole, wait=True, note=lambda text: None)

    def _end(self) -> None:
        if self._ray is None:
            from oscine.extensions.cluster.ray import control

            control.down(lambda text: None)
        local.disconnect()  # first, because a client waits a minute for a Ray that is gone
        if self._ray is not None:
            self._ray.stop()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def model(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def actors(self) -> list[Actor]:
        """On all machines."""
        import ray

        asked = {machine: agent.actors.remote() for machine, agent in self._agents.items()}
        return [Actor(kind, machine, pid) for machine, found in asked.items() for kind, pid in ray.get(found)]

    def kill(self, actor: Actor) -> None:
        """It, and all processes that it started, with SIGKILL."""
        import ray

        ray.get(self._agents[actor.machine].kill.remote(actor.pid))

    def _all(self) -> list[psutil.Process]:
        assert self._ray is not None, "on the machines of another Ray, processes are not this one's children"
        return psutil.Process(self._ray.pid).children(recursive=True)

    def ready(self) -> Counter[str]:
        """Roles of the replicas that the router knows as ready; none while there is no router."""
        from oscine.extensions.cluster.ray import control

        snapshot = control.state().snapshot
        replicas = snapshot.replicas if snapshot is not None else []
        return Counter(replica.role for replica in replicas if replica.state == "ready")

    def cpu_seconds(self) -> Counter[str]:
        """CPU time so far, by kind; ray is all that is no actor of Serve. Only on a Ray of its own."""
        used: Counter[str] = Counter()
        for process in self._all():
            try:
                times = process.cpu_times()
                used[kind_of(process)] += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return used


def kind_of(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "ray"
    if "oscine.engine.process.server" in command:
        return "engine"
    _, _, actor = command.partition("ray::ServeReplica:")
    return actor.split(":")[1].split(".")[0].split()[0] if actor else "ray"


def _spread(deployment: Deployment) -> Deployment:
    models = tuple(
        replace(model, roles=tuple(replace(role, max_replicas_per_node=1) for role in model.roles))
        for model in deployment.models
    )
    return replace(deployment, models=models, server=replace(deployment.server, host="0.0.0.0", allowed_hosts=("*",)))


class _Agent:
    """Of one machine: an actor that sees and ends the processes of the others."""

    def actors(self) -> list[tuple[str, int]]:
        return [(kind, process.pid) for process in _workers() if (kind := kind_of(process)) not in ("engine", "ray")]

    def kill(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            actor = psutil.Process(pid)
            for process in (*actor.children(recursive=True), actor):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _workers() -> Iterator[psutil.Process]:
    """All processes that the Ray of this machine has started."""
    with suppress(psutil.NoSuchProcess):
        yield from psutil.Process(os.getppid()).children(recursive=True)


def _agents() -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on(machine: str) -> Any:
        place = NodeAffinitySchedulingStrategy(machine, soft=False)
        return ray.remote(_Agent).options(num_cpus=0, scheduling_strategy=place).remote()  # type: ignore[call-overload]

    return {node["NodeID"]: on(node["NodeID"]) for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
