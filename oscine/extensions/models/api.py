"""Endpoints that change which models are in memory, as a part of the server."""

from oscine.api.common.errors import Error
from oscine.api.interface import Api
from oscine.api.openapi import GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.models.sleep.schemas import Sleeping, SleepQuery, WakeQuery
from oscine.extensions.models.sleep.allowed import check_sleep
from oscine.extensions.models.sleep.endpoint import SleepEndpoints


class ModelsApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        check_sleep(service.config.engine, service.config.server.data_parallel_size)

    @property
    def operations(self) -> list[Operation]:
        sleep, other = SleepEndpoints(self.service), {"404": Error, "409": Error, "503": Error}
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
