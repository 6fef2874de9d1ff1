"""A deployment as Ray Serve applications: one per model, whose deployments are its roles; one of router and ingress.

Settings that need new actors make the version of an actor; all others are changed in place.
"""

import hashlib
import shlex
import sys
import warnings
from dataclasses import replace
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

import oscine
from oscine.extensions.cluster.ray.ingress import Ingress
from oscine.extensions.cluster.ray.names import INGRESS, ROUTER
from oscine.extensions.cluster.ray.replica import ReplicaActor, ReplicaOptions
from oscine.extensions.cluster.ray.router import RouterActor
from oscine.extensions.cluster.scaling.policy import Goals
from oscine.extensions.cluster.scaling.pool_load import LOOK_BACK_S
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RolePart, RoleSpec

_HEALTH_S = 0.5  # between two looks at an actor
_HEALTH_TIMEOUT_S = 10.0  # an actor that does not answer so long is replaced
_POLICY = "oscine.extensions.cluster.ray.autoscaling:PoolPolicy"
_REPORT_S = 1.0  # between two reports of a replica to the policy
_WAIT_LOOP_S = 0.1  # of Serve, before it lets an actor shut itself down
_SHUTDOWN_S = 10.0  # beyond the drain


def model_app(model: ModelSpec, deployment: Deployment) -> serve.Application:
    """The Serve application of one of the deployment's models."""
    prefill, serving = model.role("prefill"), model.serving
    first, *others = [(serving, part) for part in serving.parts]
    if prefill is not None:
        others += [(prefill, part) for part in prefill.parts]
    return _bind(model, *first, deployment, *(_bind(model, *other, deployment) for other in others))


def _bind(
    model: ModelSpec, role: RoleSpec, of: RolePart, cluster: Deployment, *companions: serve.Application
) -> serve.Application:
    drain_s = cluster.server.drain_s
    threads = max(1, int(role.cpus) // role.data_parallel_size)
    options = ReplicaOptions(
        model.name,
        role.role,
        tuple(replace(engine, num_threads=threads) for engine in role.engines),
        cluster.prefix_seed,
        drain_s=drain_s,
        key=cluster.key,
        wire_version=cluster.wire_version,
        share_experts=role.enable_expert_parallel and role.engine.executor != "fake",
    )
    deployment = _deployment(
        ReplicaActor,
        name=of.name,
        **_scale(model, role, of.replicas),
        ray_actor_options={
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            **_takes(role.resource),
            **({"label_selector": of.labels} if of.labels else {}),
            **_runs(cluster),
        },
        max_replicas_per_node=role.max_replicas_per_node or None,
        **_lifecycle(options, drain_s, surge=role.surge),
    )
    return deployment.bind(options, *companions)


def _runs(cluster: Deployment) -> dict[str, Any]:
    """Actors run the release of `oscine cluster up`, and not that of the Python with which Ray was started."""
    return {"runtime_env": {"py_executable": shlex.quote(sys.executable)}} if cluster.wire_version else {}


def _takes(resource: str) -> dict[str, Any]:
    return {"resources": {resource: 1}} if resource else {}


def _deployment(kind: type, **options: Any) -> serve.Deployment:
    made: serve.Deployment = serve.deployment(kind).options(**options)  # type: ignore[attr-defined]
    return made


def _scale(model: ModelSpec, role: RoleSpec, replicas: Replicas) -> dict[str, Any]:
    """Serve's own delays are none: our policy alone decides."""
    if not replicas.scales:
        return {"num_replicas": replicas.min}
    goals = msgspec.to_builtins(Goals(role.role, model.levels, model.scaling))
    policy = AutoscalingPolicy(policy_function=_POLICY, policy_kwargs=goals)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # Serve would rather have metrics_interval_s in the environment of every process
        warnings.simplefilter("ignore", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            metrics_interval_s=_REPORT_S,
            look_back_period_s=LOOK_BACK_S + _REPORT_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )
    return {"autoscaling_config": config}


def cluster_app(deployment: Deployment, listen_within_s: float = 0.0) -> serve.Application:
    """`listen_within_s`: see Ingress.reconfigure."""
    server, tools = deployment.server, deployment.tools
    models = msgspec.to_builtins(deployment.models)
    router = _deployment(
        RouterActor,
        name=ROUTER,
        ray_actor_options={"num_cpus": 0, **_takes(deployment.router_resource), **_runs(deployment)},
        user_config={"models": models},
        **_lifecycle(deployment.key, server.drain_s),  # as long as draining ingresses may need it
    )
    ingress = _deployment(
        Ingress,
        name=INGRESS,
        num_replicas=deployment.ingress_replicas,
        ray_actor_options={"num_cpus": 0, **_takes(deployment.ingress_resource), **_runs(deployment)},
        user_config={
            "models": models,
            "prefix_seed": deployment.prefix_seed,
            "listen_within_s": listen_within_s,
        },
        **_lifecycle((server, tools, deployment.key), server.drain_s),
    )
    # The key is not in user_config, which Serve shows.
    return ingress.bind(server, tools, deployment.key, router.bind(deployment.key, deployment.wire_version))


def _lifecycle(options: object, drain_s: float, *, surge: bool = True) -> dict[str, Any]:
    """`options`: what an actor is made with; where it changes, actors are replaced.

    With `surge` new ones are there before old ones go: two ingresses have the port for that time, so it never closes.
    """
    made_of = oscine.__version__.encode() + msgspec.json.encode(options)
    return {
        "version": hashlib.sha256(made_of).hexdigest()[:16],
        "_internal": True,  # without a version of ours, each call of serve.run would replace every actor
        "max_surge_percent": 100 if surge else 0,
        "max_constructor_retry_count": 1,  # an engine has its own retries
        "health_check_period_s": _HEALTH_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": _WAIT_LOOP_S,
        "graceful_shutdown_timeout_s": drain_s + _SHUTDOWN_S,
        "logging_config": LoggingConfig(enable_access_log=False),  # else a line for each call
    }
