"""The loads of the replicas that take requests, counted anew only where something has changed since."""

from collections.abc import Mapping
from math import inf

from oscine.extensions.replicas.routing.cost import ReplicaLoad
from oscine.extensions.replicas.routing.replica_view import ReplicaView


class KnownLoads:
    """Replica -> load. After each change of a view call `note`; `refresh` also counts again what has expired."""

    def __init__(self, views: Mapping[str, ReplicaView]) -> None:
        """`views` may change later."""
        self.free: dict[str, ReplicaLoad] = {}
        self.busy: dict[str, ReplicaLoad] = {}  # these have enough to do
        self._views = views
        self._changed: dict[str, None] = {}
        self._until_s = inf  # when the first load or state expires

    def note(self, name: str) -> None:
        """The replica has changed, has come or has gone."""
        self._changed[name] = None

    def refresh(self, now_s: float) -> None:
        """`free` and `busy` are those of now."""
        if now_s > self._until_s:
            self._until_s = inf
            self._changed = dict.fromkeys([*self._changed, *self._views])
        for name in self._changed:
            self._count(name, now_s)
        self._changed.clear()

    def _count(self, name: str, now_s: float) -> None:
        self.free.pop(name, None)
        self.busy.pop(name, None)
        view = self._views.get(name)
        if view is None:
            return
        if view.state(now_s) == "ready":
            load = view.load(now_s)
            (self.free if load.num_requests < view.bound else self.busy)[name] = load
        self._until_s = min(self._until_s, view.same_until_s(now_s))
