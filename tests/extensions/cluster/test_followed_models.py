"""The models of an ingress are added, changed and removed independently of each other."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.api.apis import make_service
from oscine.engine.process.client import Engine
from oscine.engine.wire.stream import EngineDied
from oscine.extensions.replicas.client.followed_models import FollowedModels, cluster_options
from oscine.extensions.replicas.spec.deployment import ModelSpec, Replicas, RoleSpec
from oscine.settings.config import Config, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import EngineInfo
from tests.api.scripted_engine import ScriptedEngine, in_pieces
from tests.waiting import until


class LateEngine(ScriptedEngine):
    """Ready when `served` is set, as a cluster is when it has a replica."""

    def __init__(self) -> None:
        super().__init__(in_pieces([65], 1))
        self.served = asyncio.Event()
        self.failure: str | None = None

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> EngineInfo:
        await self.served.wait()
        if self.failure is not None:
            raise EngineDied(self.failure)
        await super().start()
        return await super().wait_ready()


class Followed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = make_service(Config())
        self.models = FollowedModels(self.service)
        self.engines: dict[str, list[LateEngine]] = {}

    def spec(self, *names: str, max_num_seqs: int = 8) -> ModelSpec:
        scheduler = SchedulerOptions(max_num_seqs=max_num_seqs)
        options = EngineOptions(model=ModelOptions(model=str(self.folder)), scheduler=scheduler)
        return ModelSpec(names, (RoleSpec(engine=options),))

    def _engine(self, model: ModelSpec) -> Engine:
        engine = LateEngine()
        self.engines.setdefault(model.name, []).append(engine)
        return engine

    async def update(self, *models: ModelSpec, prefix_seed: str = "") -> None:
        self.models.update(models, self._engine, prefix_seed)
        await asyncio.sleep(0)

    @property
    def states(self) -> dict[str, str]:
        return {name: model.state for model in self.service.models for name in model.names}


@pytest.fixture
def followed(model_folder: Path) -> Followed:
    return Followed(model_folder)


def test_a_model_that_nobody_serves_delays_no_other(followed: Followed) -> None:
    async def scenario() -> None:
        stuck, good, later = followed.spec("stuck"), followed.spec("good"), followed.spec("later")
        await followed.update(stuck, good)
        followed.engines["good"][0].served.set()
        await until(lambda: followed.states["good"] == "ready")
        assert followed.models.pending == ["stuck"]
        await followed.update(stuck, good, later)
        followed.engines["later"][0].served.set()
        await until(lambda: followed.states == {"stuck": "starting", "good": "ready", "later": "ready"})
        await followed.update(good, later)
        await until(lambda: not followed.models.pending)
        assert followed.states == {"good": "ready", "later": "ready"}
        assert followed.engines["stuck"][0].state == "stopped"
        assert [len(engines) for engines in followed.engines.values()] == [1, 1, 1]

    asyncio.run(scenario())


def test_a_model_that_goes_leaves_its_name_to_one_that_comes(followed: Followed) -> None:
    async def scenario() -> None:
        await followed.update(followed.spec("old", "name"))
        await followed.update(followed.spec("new", "name"))
        assert list(followed.states) == ["new", "name"]

    asyncio.run(scenario())


def test_what_is_changed_once_more_takes_the_last_form(followed: Followed) -> None:
    """The one that runs stays until its last successor is ready; those between are stopped."""

    async def scenario() -> None:
        await followed.update(followed.spec("a"))
        first = followed.engines["a"][0]
        first.served.set()
        await until(lambda: not followed.models.pending)
        await followed.update(followed.spec("a", max_num_seqs=16))
        await followed.update(followed.spec("a", "b", max_num_seqs=16))
        _, second, third = followed.engines["a"]
        await until(lambda: second.state == "stopped")
        assert followed.states == {"a": "ready"}
        assert followed.models.engines == {"a": first}
        third.served.set()
        await until(lambda: not followed.models.pending)
        assert followed.states == {"a": "ready", "b": "ready"}
        assert followed.models.engines == {"a": third}

    asyncio.run(scenario())


def test_another_prefix_seed_changes_every_model(followed: Followed) -> None:
    async def scenario() -> None:
        for seed in ("00", "00", "01"):
            await followed.update(followed.spec("a"), prefix_seed=seed)
        assert len(followed.engines["a"]) == 2

    asyncio.run(scenario())


def test_what_failed_is_tried_again(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        await followed.update(followed.spec("a"))
        engine = followed.engines["a"][0]
        engine.failure = "no such weights"
        engine.served.set()
        await until(lambda: not followed.models.pending)
        assert caplog.messages == ["a cannot be served: no such weights"]
        await followed.update(followed.spec("a"))
        followed.engines["a"][1].served.set()
        await until(lambda: not followed.models.pending)
        assert followed.states == {"a": "ready"}
        await followed.update(followed.spec("a"))
        assert not followed.models.pending

    asyncio.run(scenario())


def test_the_server_takes_what_all_replicas_together_and_the_queue_do(followed: Followed) -> None:
    model = followed.spec("a", max_num_seqs=10)
    role = replace(model.serving, replicas=Replicas(1, 3))
    scheduler = role.engine.scheduler
    found = cluster_options(replace(model, roles=(role,))).scheduler
    assert found.max_num_seqs == 30
    assert found.max_waiting == 3 * scheduler.max_waiting + model.queue.max_requests
