"""Endpoints that change which models are in memory, as a part of the server, and the models on demand."""

import logging

from oscine.api.common.errors import Error
from oscine.api.interface import Api
from oscine.api.openapi import GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.models.manager import Manager
from oscine.extensions.models.memory import Room
from oscine.extensions.models.sleep.allowed import check_sleep
from oscine.extensions.models.sleep.endpoint import SleepEndpoints
from oscine.extensions.models.sleep.schemas import Sleeping, SleepQuery, WakeQuery
from oscine.extensions.models.sources import sources_of
from oscine.settings.option import OptionError
from oscine.system.environment import Environment

logger = logging.getLogger(__name__)


class ModelsApi(Api):
    def __init__(self, service: Service) -> None:
        """Raises OptionError for options that cannot be used."""
        super().__init__(service)
        config = service.config
        check_sleep(config.engine, config.server.data_parallel_size)
        self._manager: Manager | None = None
        if config.models.on_demand:
            device = config.engine.model.device
            on_gpu = device.startswith("cuda") or (device == "auto" and Environment().num_gpus > 0)
            room = Room(config.engine, on_gpu=on_gpu and config.engine.executor != "fake")
            self._manager = service.demand = Manager(service, sources_of(config), room)
        elif config.models.pinned_models:
            raise OptionError("pinned-models", "needs --models or --models-dir", "models")

    async def open(self) -> None:
        if self._manager is not None:
            self._manager.open()
            names = ", ".join(self.service.names) or "none yet"
            logger.info("models that are loaded when requests name them: %s", names)

    async def started(self) -> None:
        if self._manager is not None:
            self._manager.load_pinned()

    async def stop(self) -> None:
        if self._manager is not None:
            await self._manager.stop()

    @property
    def operations(self) -> list[Operation]:
        sleep, other = SleepEndpoints(self.service, self._manager), {"404": Error, "409": Error, "503": Error}
        return [
            POST(
                "/sleep",
                sleep.sleep,
                "Free the memory of a model",
                query=SleepQuery,
                answer=Sleeping,
                other=other,
                admin=True,
            ),
            POST(
                "/wake_up",
                sleep.wake_up,
                "Bring a model back into memory",
                query=WakeQuery,
                answer=Sleeping,
                other=other,
                admin=True,
            ),
            GET(
                "/is_sleeping",
                sleep.is_sleeping,
                "Whether a model sleeps",
                query=WakeQuery,
                answer=Sleeping,
                other={"404": Error},
            ),
        ]
