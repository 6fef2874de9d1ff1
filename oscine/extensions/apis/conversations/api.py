"""The Conversations API as a part of the server, over the store of responses."""

from starlette.convertors import Convertor, register_url_convertor

from oscine.api.interface import Api
from oscine.api.openapi import DELETE, GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.apis.conversations.endpoint import Conversations
from oscine.extensions.apis.conversations.schemas import (
    ConversationChange,
    ConversationItem,
    ConversationObject,
    ConversationRequest,
    DeletedConversation,
    IncludeQuery,
    NewItems,
)
from oscine.extensions.apis.responses.api import responses_of
from oscine.extensions.apis.responses.schemas import InputItems, ItemsQuery

_ALL = "/v1/conversations"
_ONE = f"{_ALL}/{{id}}"
_ITEMS = f"{_ONE}/items"
_ITEM = f"{_ITEMS}/{{item_id:any_id}}"  # clients choose ids of items


class AnyId(Convertor[str]):
    """The end of a path. Starlette's own converters take no line break, and `$` also matches in front of one."""

    regex = r"(?s:.*)(?!\n)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_id", AnyId())


class ConversationsApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._endpoint = Conversations(responses_of(service).kept.store, service.config.server.max_body_bytes)

    @property
    def operations(self) -> list[Operation]:
        do, said = self._endpoint, {"type": "message", "role": "user", "content": "What is 27 + 58?"}
        return [
            POST(
                _ALL,
                do.create,
                "Create a conversation",
                body=ConversationRequest,
                answer=ConversationObject,
                example={"items": [said]},
            ),
            GET(_ONE, do.retrieve, "One conversation", answer=ConversationObject),
            POST(
                _ONE,
                do.change,
                "Change the metadata of a conversation",
                body=ConversationChange,
                answer=ConversationObject,
                example={"metadata": {"topic": "sums"}},
            ),
            DELETE(_ONE, do.delete, "Delete a conversation", answer=DeletedConversation),
            POST(
                _ITEMS,
                do.add_items,
                "Add items to a conversation",
                body=NewItems,
                query=IncludeQuery,
                answer=InputItems,
                example={"items": [said]},
            ),
            GET(_ITEMS, do.list_items, "The items of a conversation", query=ItemsQuery, answer=InputItems),
            GET(_ITEM, do.retrieve_item, "One item of a conversation", query=IncludeQuery, answer=ConversationItem),
            DELETE(_ITEM, do.delete_item, "Delete an item of a conversation", answer=ConversationObject),
        ]
