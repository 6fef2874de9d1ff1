"""Ids by which clients name responses, conversations, items, files, batches and vector stores."""

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta
from starlette.convertors import Convertor, register_url_convertor

from oscine.api.common.asgi import ASGIApp, Receive, Scope, Send
from oscine.api.common.errors import invalid

MAX_ID = 512  # characters. Other servers give items ids of more than 400.
Id = Annotated[str, Meta(max_length=MAX_ID)]


class AnyId(Convertor[str]):
    """The end of a path, `{name:any_id}`. Other converters take no line break, and `$` also matches in front of one."""

    regex = r"(?s:.*)(?!\n)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_id", AnyId())


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
