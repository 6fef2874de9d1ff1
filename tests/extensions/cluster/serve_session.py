"""The router in real Ray Serve, over real engines with a fake executor.

`python -m tests.extensions.cluster.serve_session`: a process of its own, as Ray changes the one that uses it.

Prints what happened as one line of JSON.
"""

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray import serve

from oscine.engine.core.prefix_index import extend_digests, root_of
from oscine.extensions.cluster.ray.names import router_address, router_of
from oscine.extensions.cluster.ray.replica import ReplicaActor, ReplicaOptions
from oscine.extensions.cluster.ray.router import RouterActor
from oscine.extensions.cluster.ray.weights import RayDirectory
from oscine.extensions.replicas.client.router import RouterClient
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams
from tests.extensions.cluster.local_placer import guest

SEED = "00ff"
PAGE = 16
START_S = 200  # for an actor or Ray itself: twenty times what it takes where cores are free
KEY = "a key of thirty-two characters.."


@contextmanager
def within(seconds: int, what: str) -> Iterator[None]:
    """Raises TimeoutError with its name if it takes longer. Ray's own waits have no end."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not in {seconds} s: {what}")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def deploy(num_replicas: int) -> None:
    engine = EngineOptions(
        ModelOptions(max_model_len=2048),
        CacheOptions(page_size=PAGE),
        SchedulerOptions(max_num_seqs=4),
        executor="fake",
        quiet=True,
    )
    options = ReplicaOptions("m", "aggregated", (engine,), SEED, drain_s=1.0, key=KEY)
    replica = serve.deployment(
        ReplicaActor,
        name="aggregated",
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,
    )
    serve.run(replica.bind(options), name="engines", route_prefix=None)


def deploy_router() -> None:
    models = [ModelSpec(("m",), (RoleSpec(),), start_timeout_s=START_S)]
    router = serve.deployment(
        RouterActor,
        name="router",
        ray_actor_options={"num_cpus": 0.1},
        user_config={"models": msgspec.to_builtins(models)},
        health_check_period_s=0.5,
    )
    serve.run(router.bind(KEY), name="oscine", route_prefix=None)


def placement(name: str, tokens: list[int], **more: Any) -> Placement:
    digests: list[bytes] = []
    extend_digests(digests, tokens, len(tokens) // PAGE, page_size=PAGE, root=root_of(SEED))
    return Placement(name, "m", digests, len(tokens), 8, **more)


async def generate(place: Place, name: str, tokens: list[int]) -> None:
    """As an ingress does."""
    client = guest(place.address, KEY)
    await client.start()
    await client.wait_ready()
    async with client.submit(GenerationRequest(name, tokens, SamplingParams(max_tokens=8))) as stream:
        async for _ in stream:
            pass
    await client.stop()


async def snapshot_when(router: RouterClient, condition: Any) -> Any:
    end_s = time.monotonic() + START_S
    while not condition(snapshot := await router.snapshot()):
        assert time.monotonic() < end_s, snapshot
        await asyncio.sleep(0.1)
    return snapshot


async def session() -> dict[str, Any]:
    router = RouterClient(router_address(router_of()), key=KEY, absence_s=START_S)
    said: dict[str, Any] = {"model": (await router.describe("m")).model}
    await snapshot_when(router, lambda s: sum(r.stats.full_pages_total > 0 for r in s.replicas) == 2)
    prompts = {name: [100 + i] * 40 * PAGE for i, name in enumerate("abcdef")}
    first = {name: await router.place(placement(name, tokens)) for name, tokens in prompts.items()}
    said["spread"] = len({place.replica for place in first.values()})
    await generate(first["a"], "a", prompts["a"])
    await snapshot_when(router, lambda s: sum(r.num_indexed_pages for r in s.replicas) >= 40)
    await kill_router(router)
    indexed = await snapshot_when(router, lambda s: sum(r.num_indexed_pages for r in s.replicas) >= 40)
    said["pages"] = {r.replica: r.num_indexed_pages for r in indexed.replicas}
    said["first"] = first["a"].replica
    again = await router.place(placement("again", prompts["a"] + [1] * PAGE))
    said["again"], said["overlap"] = again.replica, again.num_overlap_tokens
    elsewhere = await router.place(placement("elsewhere", prompts["a"], exclude=[again.replica]))
    said["elsewhere"] = elsewhere.replica
    try:
        await router.place(Placement("x", "?", [], 1, 1))
    except NoPlace as refusal:
        said["unknown"] = refusal.message
    said["placed"] = (await router.snapshot()).routers[0].placed
    router.close()
    return said


async def kill_router(router: RouterClient) -> None:
    """Returns when Serve has started another one."""
    (name,) = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#router#" in a["name"]]
    ray.kill(ray.get_actor(name, namespace="serve"))
    await snapshot_when(router, lambda s: s.routers[0].placed == 0)


def ask_directories() -> dict[str, Any]:
    """Where two processes read weights, before and after the actor that both ask has ended."""
    first, second = RayDirectory("session"), RayDirectory("session")
    first.hold(["file"], "tcp://10.0.0.1:1")
    found = [second.find("file", f"tcp://10.0.0.{n}:1") for n in (2, 3)]
    ray.kill(first._actor)
    while second.find("file", "tcp://10.0.0.3:1"):  # Ray may take a while to end it
        time.sleep(0.1)
    return {"holders": found, "after_its_end": first.find("file", "tcp://10.0.0.2:1")}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="oscine-ray-") as folder:
        with within(START_S, "the start of Ray"):
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=80 << 20,
                _temp_dir=folder,
            )
        try:
            with within(START_S, "the start of Serve"):
                serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            with within(START_S, "the list of machines with weights"):
                said = ask_directories()
            with within(2 * START_S, "two replicas"):
                deploy(2)
            with within(START_S, "the router"):
                deploy_router()
            with within(700, "the session"):
                print(json.dumps(said | asyncio.run(session())), flush=True)
        finally:
            with within(100, "the end"):
                serve.shutdown()
                ray.shutdown()


if __name__ == "__main__":
    main()
