"""The service of a server that makes responses. It stores them and runs them in the background."""

from collections.abc import Callable
from typing import Generic

from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import T
from oscine.api.serving.service import Service
from oscine.extensions.apis.responses.background import BackgroundResponses
from oscine.extensions.apis.responses.resource import interrupted
from oscine.extensions.apis.responses.store import MEMORY, ResponseStore
from oscine.settings.config import Config
from oscine.types import EngineInfo


class ResponseService(Service):
    """A Service that keeps responses. It stops what runs in the background before its models."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = config.server
        path = options.responses_db or MEMORY
        self.store = ResponseStore(path, options.responses_max_bytes, options.responses_max_age)
        self.background = BackgroundResponses()

    async def start(self, on_ready: Callable[[EngineInfo], None] = lambda info: None) -> None:
        """Raises ValueError when the database cannot be used, and else as Service does."""
        await self.store.open(interrupted)
        await super().start(on_ready)

    async def stop(self) -> None:
        await self.background.stop()
        await self.store.close()
        await super().stop()


class ResponseEndpoint(Endpoint[T], Generic[T]):
    """An endpoint that needs stored responses."""

    service: ResponseService

    def __init__(self, service: ResponseService) -> None:
        super().__init__(service)
