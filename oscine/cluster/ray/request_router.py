"""Ray Serve's request router hook: replicas in the order of what a request would cost there.

For any deployment whose replicas report, as their routing stats, where their engine publishes (ReplicaReport):

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="oscine.cluster.ray.request_router:KVAwareRequestRouter",
        request_router_kwargs={"weights": {"missing": 2.0}},  # other than those of CostWeights
    ))

Calls whose first argument is a Placement are routed by their prefix, others by load alone. Everything here runs on the
event loop of Serve's router: a thread of its own, unless the handle was made to route on its caller's loop. Serve sends
this module by value: it must hold no state.
"""

import logging
from typing import Any

import msgspec
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from oscine.cluster.routing.cost import CostWeights
from oscine.cluster.routing.fleet import fleet_of
from oscine.cluster.routing.replica_view import ReplicaReport
from oscine.cluster.spec.placement import Placement

_log = logging.getLogger(__name__)


class KVAwareRequestRouter(RequestRouter):
    """Owns the index and the subscriptions of one deployment."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`weights`: those that are other than the default."""
        self.fleet = fleet_of(self._deployment_id.app_name, self._deployment_id.name)
        self.fleet.weights = msgspec.convert(kwargs.get("weights", {}), CostWeights)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.fleet.update({r.replica_id.unique_id: _report(r) for r in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.fleet.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica is a rank of its own; none where all are excluded or drain: Serve then asks again soon."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = _placement(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = [name for name in self.fleet.rank(wanted.digests, wanted.num_tokens, wanted.exclude) if name in by_name]
        if order:
            self.fleet.place(wanted.request_id, order[0], wanted.digests, wanted.num_tokens)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Corrects what was counted, if another replica than the first took it."""
        wanted = _placement(pending_request)
        placed = self.fleet.placed(wanted.request_id)
        if placed is None or placed.replica != replica_id.unique_id:
            self.fleet.place(wanted.request_id, replica_id.unique_id, wanted.digests, wanted.num_tokens)


def _placement(pending: PendingRequest) -> Placement:
    first = pending.args[0] if pending.args else None
    if isinstance(first, Placement):
        return first
    return Placement(pending.metadata.internal_request_id, "", digests=[], num_tokens=0, max_tokens=0)


def _report(replica: RunningReplica) -> ReplicaReport:
    """What the replica says of itself; nothing before its routing stats were asked for the first time."""
    try:
        return msgspec.convert(replica.replica_metadata | replica.routing_stats, ReplicaReport)
    except msgspec.ValidationError as error:
        _log.warning("routing stats of %s cannot be used: %s", replica.replica_id, error)
        return ReplicaReport()
