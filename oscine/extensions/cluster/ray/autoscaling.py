"""Ray Serve's autoscaling hook: brings what Serve gathers to the policy, and the policy's word to Serve.

    AutoscalingConfig(policy=AutoscalingPolicy(policy_function="oscine.extensions.cluster.ray.autoscaling:PoolPolicy",
                                               policy_kwargs={...}))  # fields of Goals

Serve calls it in its controller, ten times a second, for one deployment; it must not wait for anything. Serve sends
this module there by value, so nothing may compare its classes; what the state consists of is defined elsewhere.
"""

import logging
from typing import Any

import msgspec
from ray.serve.config import AutoscalingContext

from oscine.extensions.cluster.scaling.policy import EVERY_S, Bounds, Goals, State, decide
from oscine.extensions.cluster.scaling.pool_load import PoolLoad, replica_load

_STATE = "oscine"  # beside what Serve keeps

logger = logging.getLogger("ray.serve")  # the controller's


class PoolPolicy:
    """One for each deployment."""

    def __init__(self, **goals: Any) -> None:
        self._goals = msgspec.convert(goals, Goals)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the replicas wanted, and what is to be remembered."""
        state: State = context.policy_state.get(_STATE) or State()
        target, now_s = context.target_num_replicas, context.current_time or 0.0
        if now_s - state.time_s < EVERY_S:
            return target, {_STATE: state}
        bounds = Bounds(context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)
        decision = decide(pool_load(context, now_s), target, bounds, self._goals, state)
        if decision.replicas != target:
            name = f"{context.app_name}/{context.deployment_name}"
            logger.info("%s: %d -> %d replicas: %s", name, target, decision.replicas, decision.reason)
        return decision.replicas, {_STATE: decision.state}


def pool_load(context: AutoscalingContext, now_s: float) -> PoolLoad:
    series: dict[object, dict[str, list[tuple[float, float]]]] = {}
    for name, replicas in (context.raw_metrics or {}).items():
        for replica, points in replicas.items():
            series.setdefault(replica, {})[name] = [(point.timestamp, point.value) for point in points]
    loads = [replica_load(of_replica, now_s) for of_replica in series.values()]
    return PoolLoad(
        now_s,
        ready=context.current_num_replicas,
        replicas=tuple(load for load in loads if load is not None),
        queued=context.total_num_requests,
    )
