"""The Ray Serve applications of a deployment."""

import sys

from ray.serve import Application

from oscine.extensions.cluster.ray.apps import cluster_app, model_app
from oscine.extensions.cluster.ray.control import fronts
from oscine.extensions.replicas.spec.deployment import (
    Deployment,
    ModelSpec,
    Replicas,
    RoleSpec,
    app_name,
    front_name,
)
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions, ServerOptions


def patience_s(app: Application) -> float:
    """How long Serve lets an actor end by itself."""
    return float(app._bound_deployment._deployment_config.graceful_shutdown_timeout_s)


def test_the_router_may_stay_as_long_as_ingresses_that_drain() -> None:
    """They end together; requests that still wait for a place are to get one."""
    model = ModelSpec(("m",), (RoleSpec("aggregated"),))
    ingress = cluster_app(Deployment((model,), server=ServerOptions(drain_s=33.0)))
    router = ingress._bound_deployment.init_args[-1]
    assert patience_s(router) >= patience_s(ingress) > 33.0


def test_a_replica_is_placed_with_the_gpus_of_all_its_ranks() -> None:
    engine = EngineOptions(ModelOptions(tensor_parallel_size=2))
    prefill, decode = RoleSpec("prefill", gpus=1), RoleSpec("decode", engine, gpus=2, cpus=4)
    model = ModelSpec(("m",), (prefill, decode))
    app = model_app(model, Deployment((model,)))
    actor = app._bound_deployment
    assert actor.ray_actor_options == {"num_cpus": 4, "num_gpus": 2}
    options, companion = actor.init_args
    (engine,) = options.engines
    assert engine.model.tensor_parallel_size == 2
    assert engine.model.device == "auto"  # the GPUs that Ray shows to the replica
    assert companion._bound_deployment.ray_actor_options["num_gpus"] == 1


def test_engines_of_a_replica_have_a_gpu_each_and_share_the_tokens_of_a_step() -> None:
    scheduler = SchedulerOptions.of({"max-num-seqs": 64, "max-num-batched-tokens": 8192})
    role = RoleSpec(
        engine=EngineOptions(scheduler=scheduler), gpus=4, data_parallel_size=4, enable_expert_parallel=True, cpus=8
    )
    model = ModelSpec(("m",), (role,))
    (options,) = model_app(model, Deployment((model,)))._bound_deployment.init_args
    assert options.share_experts
    assert [one.model.device for one in options.engines] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {one.scheduler.max_num_batched_tokens for one in options.engines} == {2048}
    assert {one.num_threads for one in options.engines} == {2}


def test_replicas_are_spread_and_kept_where_a_resource_is() -> None:
    model = ModelSpec(("m",), (RoleSpec(cpus=2, resource="rack-1", max_replicas_per_node=1),))
    spread = model_app(model, Deployment((model,)))._bound_deployment
    assert spread.ray_actor_options == {"num_cpus": 2, "num_gpus": 0, "resources": {"rack-1": 1}}
    assert spread._replica_config.max_replicas_per_node == 1


def test_replicas_are_divided_among_racks() -> None:
    racks = RoleSpec("decode", replicas=Replicas(3, 3), labels=("rack=a", "rack=b"))
    model = ModelSpec(("m",), (racks, RoleSpec("prefill", labels=("rack=a",))))
    first = model_app(model, Deployment((model,)))._bound_deployment
    _, second, prefill = first.init_args
    found = [first, *(one._bound_deployment for one in (second, prefill))]
    assert [(one.name, one.num_replicas, one.ray_actor_options["label_selector"]) for one in found] == [
        ("decode", 2, {"rack": "a"}),
        ("decode-2", 1, {"rack": "b"}),
        ("prefill", 1, {"rack": "a"}),
    ]


def test_two_releases_share_no_application_and_each_runs_its_own_python() -> None:
    model = ModelSpec(("a model",), (RoleSpec(),))
    of_none, old, new = (Deployment((model,), wire_version=version) for version in ("", "0" * 16, "1" * 16))
    names = [(front_name(one.wire_version), app_name(model.name, one.wire_version)) for one in (of_none, old, new)]
    assert names == [
        ("oscine", "oscine-a-model"),
        ("oscine.00000000", "oscine-a-model.00000000"),
        ("oscine.11111111", "oscine-a-model.11111111"),
    ]
    assert fronts(name for pair in names for name in pair) == [front for front, _ in names]
    for deployment in (of_none, old):
        ingress, replica = (app._bound_deployment for app in (cluster_app(deployment), model_app(model, deployment)))
        (options,) = replica.init_args
        *_, router = ingress.init_args
        _, version = router._bound_deployment.init_args
        assert options.wire_version == version == deployment.wire_version
        for actor in (ingress, replica, router._bound_deployment):
            found = actor.ray_actor_options.get("runtime_env", {})
            assert found == ({"py_executable": sys.executable} if deployment.wire_version else {})
