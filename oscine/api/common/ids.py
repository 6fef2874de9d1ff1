"""Ids by which clients name responses, conversations, items, files, batches and vector stores."""

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta

from oscine.api.common.asgi import ASGIApp, Receive, Scope, Send
from oscine.api.common.errors import invalid

MAX_ID = 512  # characters. Other servers give items ids of more than 400.
Id = Annotated[str, Meta(max_length=MAX_ID)]


class IdCheck:
    """Refuses an id in the path that is too long: middleware of an endpoint."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """`names`: parameters of the path."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name in self._names:
            if len(scope["path_params"][name]) > MAX_ID:
                raise invalid(name, f"its length must be at most {MAX_ID}")
        await self._app(scope, receive, send)
