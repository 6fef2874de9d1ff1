"""The policy as Ray Serve has it: sent by value, made from its arguments, called with Serve's own context."""

from collections.abc import Mapping

import pytest

from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec, ServiceLevels

config = pytest.importorskip("ray.serve.config")
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState  # noqa: E402
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue  # noqa: E402
from ray.serve._private.config import DeploymentConfig  # noqa: E402
from ray.serve._private.deployment_info import DeploymentInfo  # noqa: E402

from oscine.extensions.cluster.ray.apps import model_app  # noqa: E402

NAME = DeploymentID("aggregated", "oscine-nano")
REPLICA = ReplicaID("a", NAME)
FULL = {"running": 8.0, "waiting": 4.0, "max_num_seqs": 8.0, "first_tokens": 1.0, "held_back": 30.0}


class Clock:
    """Serve asks time.time()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_800_000_000.0
        monkeypatch.setattr("ray.serve._private.autoscaling_state.time.time", lambda: self.now_s)


def serve_state(replicas: Replicas) -> DeploymentAutoscalingState:
    """Serve's own side of autoscaling, of the deployment that we make."""
    model = ModelSpec(("nano",), (RoleSpec(replicas=replicas),), levels=ServiceLevels(ttft_s=1.0))
    app = model_app(model, Deployment((model,), prefix_seed="00"))
    autoscaling = app._bound_deployment._deployment_config.autoscaling_config
    info = DeploymentInfo(
        deployment_config=DeploymentConfig(autoscaling_config=autoscaling),
        replica_config=None,
        start_time_ms=0,
        deployer_job_id="",
    )
    state = DeploymentAutoscalingState(NAME)
    assert state.register(info, replicas.min) == replicas.min
    return state


def play(
    state: DeploymentAutoscalingState, clock: Clock, seconds: int, values: Mapping[str, float], target: int = 1
) -> int:
    """One replica reports every second, as Serve's does; Serve asks ten times a second."""
    state.update_running_replica_ids([REPLICA])
    points: dict[str, list[TimeStampedValue]] = {name: [] for name in values}
    for _ in range(seconds):
        for name, value in values.items():
            points[name] = [*points[name], TimeStampedValue(clock.now_s, value)][-6:]
        state.record_request_metrics_for_replica(ReplicaMetricReport(REPLICA, dict(points), clock.now_s))
        for _ in range(10):
            target = state.get_decision_num_replicas(target)
            clock.now_s += 0.1
    return target


def test_serve_follows_the_policy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, state = Clock(monkeypatch), serve_state(Replicas(1, 4))
    assert play(state, clock, 5, {"running": 1.0, "max_num_seqs": 8.0}) == 1
    assert play(state, clock, 8, FULL) > 1


def test_a_replica_that_fell_silent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, state = Clock(monkeypatch), serve_state(Replicas(1, 4))
    assert play(state, clock, 4, FULL) >= 1
    clock.now_s += 60.0
    assert {state.get_decision_num_replicas(3) for _ in range(50)} == {3}


def test_serve_never_leaves_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, state = Clock(monkeypatch), serve_state(Replicas(2, 3))
    assert play(state, clock, 40, FULL | {"waiting": 500.0}, target=2) == 3
