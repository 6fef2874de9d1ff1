"""The models of an ingress as the deployment file has them now: each comes, changes and goes by itself.

A model that no replica ever serves delays no other, and can be changed and removed while it waits.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service
from oscine.engine.process.client import Engine
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.settings.config import EngineOptions

logger = logging.getLogger(__name__)

EngineOf = Callable[[ModelSpec], Engine]


@dataclass(slots=True)
class _Followed:
    asked: tuple[object, ...] | None  # what the server was told of it last; None: that cannot be served
    served: ServedModel | None = None  # as its clients have it
    work: asyncio.Task[None] | None = None  # until it is as asked


class FollowedModels:
    """Belongs to the service's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._there: dict[str, _Followed] = {}
        self._leaving: dict[asyncio.Task[None], str] = {}

    def update(self, models: Sequence[ModelSpec], engine_of: EngineOf, prefix_seed: str = "") -> None:
        """Names of models that go are unknown at once; all else happens later. Tries again what has failed.

        `prefix_seed` is that of all engines; with another one a model has changed.
        """
        wanted = {model.name: model for model in models}
        for name in self._there.keys() - wanted.keys():
            self._remove(name, self._there.pop(name))
        for name, model in wanted.items():
            followed = self._there.setdefault(name, _Followed(None))
            asked = model.names, cluster_options(model), model.migration_retries, prefix_seed
            if followed.asked != asked:
                if followed.work is not None:
                    followed.work.cancel()
                followed.asked = asked
                followed.work = asyncio.create_task(self._bring(followed, model, engine_of))

    async def _bring(self, followed: _Followed, model: ModelSpec, engine_of: EngineOf) -> None:
        """A changed model takes the place of the former one once it is ready, so that no request is refused."""
        engine, options = engine_of(model), cluster_options(model)
        try:
            if followed.served is None:
                followed.served = self._service.add(engine, options, model.names)
                await followed.served.start()
            else:
                followed.served = await self._service.replace(followed.served, engine, options, model.names)
        except Exception as error:
            followed.asked = None
            logger.error("%s cannot be served: %s", model.name, error)

    def _remove(self, name: str, followed: _Followed) -> None:
        if followed.work is not None:
            followed.work.cancel()
        if followed.served is not None:
            leaving = asyncio.ensure_future(self._service.remove(followed.served))
            self._leaving[leaving] = name
            leaving.add_done_callback(self._leaving.pop)

    @property
    def pending(self) -> list[str]:
        """Models that are not yet as asked, or still have requests to end before they are gone."""
        coming = [name for name, one in self._there.items() if one.work is not None and not one.work.done()]
        return sorted({*coming, *self._leaving.values()})

    @property
    def engines(self) -> dict[str, Engine]:
        return {name: one.served.engine for name, one in self._there.items() if one.served is not None}


def cluster_options(model: ModelSpec) -> EngineOptions:
    """One engine as large as all replicas together, and the queue before them: the router refuses what is too much."""
    role = model.serving
    count = role.replicas.max * role.data_parallel_size
    waiting = count * role.engine.scheduler.max_waiting + model.queue.max_requests
    return as_one(role.engine, count, max_waiting=waiting)


def as_one(engine: EngineOptions, count: int, max_waiting: int) -> EngineOptions:
    """An engine as large as `count` of them together."""
    scheduler = engine.scheduler
    whole = replace(
        scheduler,
        max_num_seqs=count * scheduler.most_seqs,
        max_num_batched_tokens=count * max(scheduler.max_num_batched_tokens, scheduler.most_seqs),
        max_queued_tokens=count * scheduler.max_queued_tokens,
        max_waiting=max_waiting,
        by_memory=(),
    )
    return replace(engine, scheduler=whole)
