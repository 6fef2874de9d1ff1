"""WebSocket mode of the Responses API: GET /v1/responses with an upgrade."""

from collections.abc import Mapping, Sequence

from oscine.api.common.asgi import ASGIApp
from oscine.api.interface import Api
from oscine.api.openapi import Operation
from oscine.api.serving.service import Service
from oscine.extensions.apis.websocket.connection import Sessions


class WebSocketApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._sessions = Sessions(service)

    @property
    def operations(self) -> Sequence[Operation]:
        """A WebSocket is none of OpenAPI."""
        return ()

    @property
    def websockets(self) -> Mapping[str, ASGIApp]:
        return {"/v1/responses": self._sessions}
