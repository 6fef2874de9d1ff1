"""The JSON of requests about conversations, and of their answers, as msgspec structs."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from oscine.api.serving.parameters import about
from oscine.extensions.apis.responses.schemas import Metadata
from oscine.extensions.apis.responses.view import Object

Items = Annotated[list[Object], Meta(max_length=20)]
_METADATA = "Up to 16 pairs that are kept with the conversation."


class ConversationRequest(Struct):
    items: Annotated[Items | None, about("The first items, 20 at most.")] = None
    metadata: Annotated[Metadata | None, about(_METADATA)] = None


class ConversationChange(Struct):
    metadata: Annotated[Metadata | None, about(_METADATA)]


class NewItems(Struct):
    items: Annotated[Items, about("Items for the end of the conversation, 20 at most.")]


class IncludeQuery(Struct):
    include: list[str] = []


class ConversationObject(Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationItem(Struct):
    id: str
    type: str  # which decides what else it has


class DeletedConversation(Struct):
    id: str
    object: Literal["conversation.deleted"]
    deleted: bool
