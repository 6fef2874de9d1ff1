"""The Responses API as a part of the server: its endpoints, stored responses, and what runs in the background."""

from oscine.api.interface import Api
from oscine.api.openapi import DELETE, GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.apis.responses.background import KeptResponses
from oscine.extensions.apis.responses.context import Compact, InputTokens
from oscine.extensions.apis.responses.endpoint import Responses, StoredResponses
from oscine.extensions.apis.responses.schemas import (
    CompactedResponse,
    DeletedResponse,
    InputItems,
    ItemsQuery,
    NoQuery,
    ResponseAnswer,
    ResponseInputTokens,
    RetrieveQuery,
)


class ResponsesApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.kept = KeptResponses(service.config.server)
        self.responses = Responses(service, self.kept)

    @property
    def operations(self) -> list[Operation]:
        counted, compact = InputTokens(self.service, self.kept), Compact(self.service, self.kept)
        stored, one, asked = StoredResponses(self.service, self.kept), "/v1/responses/{id}", "What is 27 + 58?"
        return [
            POST(
                "/v1/responses",
                self.responses,
                "Create a response",
                answer=ResponseAnswer,
                example={"input": asked, "max_output_tokens": 200},
            ),
            POST(
                "/v1/responses/input_tokens",
                counted,
                "Count tokens",
                answer=ResponseInputTokens,
                example={"input": asked},
            ),
            POST(
                "/v1/responses/compact",
                compact,
                "Compact a conversation",
                answer=CompactedResponse,
                example={"model": "any", "input": asked},
            ),
            GET(one, stored.retrieve, "A stored response, or its events", query=RetrieveQuery, answer=ResponseAnswer),
            DELETE(one, stored.delete, "Delete a response", answer=DeletedResponse),
            POST(
                f"{one}/cancel",
                stored.cancel,
                "End a response in the background",
                query=NoQuery,
                answer=ResponseAnswer,
            ),
            GET(
                f"{one}/input_items",
                stored.input_items,
                "The input items of a response",
                query=ItemsQuery,
                answer=InputItems,
            ),
        ]

    async def open(self) -> None:
        """Raises ValueError when the database cannot be used."""
        await self.kept.open()

    async def stop(self) -> None:
        await self.kept.stop()


def responses_of(service: Service) -> ResponsesApi:
    """For an API that is absent without this one."""
    found = service.apis["responses"]
    assert isinstance(found, ResponsesApi)
    return found
