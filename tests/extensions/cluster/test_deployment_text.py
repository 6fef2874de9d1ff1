"""Deployment files that are written say what they were written from."""

from pathlib import Path
from random import Random

from oscine.extensions.cluster.cli.deployment_file import read_deployment
from oscine.extensions.cluster.cli.deployment_text import deployment_text
from oscine.extensions.replicas.spec.deployment import (
    Deployment,
    ModelSpec,
    PrefillLimits,
    QueueLimits,
    Replicas,
    RoleSpec,
    ScalingOptions,
    ServiceLevels,
)
from oscine.settings.config import (
    CacheOptions,
    EngineOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    SpeculationOptions,
    ToolOptions,
)
from oscine.types import Role


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    for seed in range(80):
        deployment = _deployment(Random(seed))
        file.write_text(deployment_text(deployment), "utf-8")
        assert read_deployment(file, finds_models=False) == deployment, file.read_text("utf-8")


def test_defaults_are_left_out() -> None:
    engine = EngineOptions(scheduler=SchedulerOptions.of({}), quiet=True)
    assert deployment_text(Deployment((ModelSpec(("m",), (RoleSpec(engine=engine),)),))) == (
        "models:\n- name: m\n  aggregated: {}\n"
    )


def _deployment(random: Random) -> Deployment:
    pick, often = random.choice, random.random
    server = ServerOptions(
        host=pick(["127.0.0.1", "0.0.0.0"]),
        port=pick([8000, 9001]),
        playground=often() < 0.7,
        api_keys=pick([(), ("a",), ("a", "b: c")]),
        max_connections=pick([ServerOptions().max_connections, 17]),
        drain_s=pick([ServerOptions().drain_s, 3.5]),
    )
    return Deployment(
        tuple(_model(random, number) for number in range(pick([1, 1, 2]))),
        ray=pick(["local", "auto", "10.0.0.1:6379"]),
        server=server,
        tools=ToolOptions(python_runs=pick([4, 2])),
        ingress_replicas=pick([1, 3]),
        ingress_resource=pick(["", "front"]),
        router_resource=pick(["", "inner"]),
        prefix_seed=pick(["", "0012"]),
    )


def _model(random: Random, number: int) -> ModelSpec:
    pick = random.choice
    name = f"{pick(['yes', '1e3', 'plain'])}{number}"
    kinds: list[tuple[Role, ...]] = [("aggregated",), ("prefill", "decode")]
    shapes = {"random_weights": pick([None, "120b"]), "max_model_len": pick([None, 4096])}
    return ModelSpec(
        pick([(name,), (name, f"other-{number}")]),
        tuple(_role(random, kind, shapes) for kind in pick(kinds)),
        ServiceLevels(itl_s=pick([0.1, 0.02])),
        PrefillLimits(),
        ScalingOptions(idle_s=pick([300.0, 12.0])),
        QueueLimits(pick([2048, 5]), pick([60.0, 0.5])),
        pick([4, 0]),
        pick([600.0, 30.0]),
    )


def _role(random: Random, kind: Role, shapes: dict[str, object]) -> RoleSpec:
    pick = random.choice
    ranks, engines = pick([(1, 1), (1, 1), (2, 1), (8, 1), *([] if kind != "aggregated" else [(1, 4), (2, 2)])])
    limits = {"max-num-seqs": pick([16, 256, 700]), "max-num-batched-tokens": pick([1024, 8192])}
    scheduler = {name: value for name, value in limits.items() if random.random() < 0.6}
    caches = {"kv-cache-bytes": pick([1 << 30, 12345]), "no-prefix-caching": False, "page-size": pick([64, 16])}
    engine = EngineOptions(
        ModelOptions(tensor_parallel_size=ranks, **shapes),  # type: ignore[arg-type]
        CacheOptions.of({name: value for name, value in caches.items() if random.random() < 0.5}),
        SchedulerOptions.of(scheduler, overlap=random.random() < 0.7),
        speculation=pick([SpeculationOptions("none"), SpeculationOptions("ngram", 3)]),
        cuda_graphs=random.random() < 0.7,
        executor=pick(["torch", "fake"]),
        fake_step_s=pick([0.0, 1e-3]),
        quiet=True,
    )
    return RoleSpec(
        kind,
        engine,
        pick([Replicas(), Replicas(3, 3), Replicas(0, 2)]),
        gpus=pick([0.0, float(ranks * engines), *([0.5] if ranks == engines == 1 else [])]),
        data_parallel_size=engines,
        enable_expert_parallel=engines > 1 and ranks == 1 and random.random() < 0.5,
        cpus=pick([1.0, 4.0]),
        surge=random.random() < 0.7,
    )
