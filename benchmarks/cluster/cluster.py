"""A cluster on this machine for the time of a benchmark, on its own Ray, and the CPU time of its processes."""

import json
import urllib.request
from collections import Counter
from types import TracebackType
from urllib.parse import urlsplit

import psutil

from oscine.extensions.cluster.ray import local
from oscine.extensions.replicas.spec.deployment import Deployment

_NUM_CPUS = 64  # that Ray may assign: more than the machine has, so that Ray never refuses an actor


class Cluster:
    """Context manager: the cluster and its models are ready. Nothing is left of it afterwards. The process becomes a
    client of its Ray, so there is one cluster per process.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def __enter__(self) -> "Cluster":
        self._ray = local.start(_NUM_CPUS, 0)
        try:
            self._ray.connect()
            from oscine.extensions.cluster.ray import control  # Ray is imported when its surroundings are set

            control.up(self._deployment, wait=True, note=lambda text: None)
            self.url = control.url()
        except BaseException:
            self._end()
            raise
        self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        local.disconnect()  # first, because a client waits a minute for a Ray that is gone
        self._ray.stop()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def model(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By kind: ingress, router, aggregated, prefill and decode are actors; engine; ray is all others."""
        kinds: dict[str, list[psutil.Process]] = {}
        for process in self._all():
            kinds.setdefault(kind_of(process), []).append(process)
        return kinds

    def _all(self) -> list[psutil.Process]:
        return psutil.Process(self._ray.pid).children(recursive=True)

    def ready(self) -> Counter[str]:
        """Roles of the replicas that the router knows as ready; none while there is no router."""
        from oscine.extensions.cluster.ray import control

        snapshot = control.state().snapshot
        replicas = snapshot.replicas if snapshot is not None else []
        return Counter(replica.role for replica in replicas if replica.state == "ready")

    def cpu_seconds(self) -> Counter[str]:
        """CPU time so far, by kind."""
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
