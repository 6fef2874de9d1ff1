"""What the endpoints of responses share: where they are stored, and those that run in the background."""

from oscine.api.responses.background import BackgroundResponses
from oscine.api.responses.resource import interrupted
from oscine.api.responses.store import MEMORY, ResponseStore
from oscine.config import ServerOptions


class ResponseService:
    """Of one server. `start` comes first and `stop` last; `stop` ends what runs in the background."""

    def __init__(self, options: ServerOptions) -> None:
        path = options.responses_db or MEMORY
        self.store = ResponseStore(path, options.responses_max_bytes, options.responses_max_age)
        self.background = BackgroundResponses()

    async def start(self) -> None:
        """Raises ValueError when the database cannot be used."""
        await self.store.open(interrupted)

    async def stop(self) -> None:
        await self.background.stop()
        await self.store.close()
