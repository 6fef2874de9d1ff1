"""/v1/conversations, as OpenAI has it. An API key finds its own conversations alone."""

import secrets
from collections.abc import Mapping, Sequence
from sqlite3 import Connection
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oscine.api.common.errors import APIError, not_found
from oscine.api.common.keys import Caller
from oscine.api.common.work import run_in_thread
from oscine.api.http.body import json_response, read_body
from oscine.api.serving.schemas import decode
from oscine.extensions.apis.compaction.seal import Seal
from oscine.extensions.apis.conversations.schemas import (
    ConversationChange,
    ConversationObject,
    ConversationRequest,
    DeletedConversation,
    IncludeQuery,
    NewItems,
)
from oscine.extensions.apis.responses.conversation_store import ConversationTables, StoredConversation
from oscine.extensions.apis.responses.input import ItemHistory, input_items, new_tools, refuse_duplicates
from oscine.extensions.apis.responses.plan import conversation_not_found, referenced
from oscine.extensions.apis.responses.resource import KeptItem, item_list
from oscine.extensions.apis.responses.schemas import ItemsQuery, read_query
from oscine.extensions.apis.responses.store import ResponseStore
from oscine.extensions.apis.responses.tools import ClientTools
from oscine.extensions.apis.responses.view import Object, included, shown

T = TypeVar("T")


class Conversations:
    def __init__(self, store: ResponseStore, max_body_bytes: int) -> None:
        self._store, self._max_body_bytes = store, max_body_bytes

    async def create(self, request: Request) -> Response:
        owner, (body, size) = _owner(request), await self._body(request, ConversationRequest)
        new = await self._new_items(request, [], body.items or (), size)
        conversation_id, metadata = f"conv_{secrets.token_hex(24)}", body.metadata or {}

        def write(tables: ConversationTables, db: Connection) -> int | None:
            made = tables.create(db, conversation_id, owner, metadata)
            return made + (tables.append(db, conversation_id, owner, _stored(new)) or 0)

        await self._store.write_conversation(write)
        return _shown(await self._find(conversation_id, owner))

    async def retrieve(self, request: Request) -> Response:
        return _shown(await self._find(_id(request), _owner(request)))

    async def change(self, request: Request) -> Response:
        conversation_id, owner = _id(request), _owner(request)
        metadata = (await self._body(request, ConversationChange))[0].metadata or {}
        await self._store.write_conversation(
            lambda tables, db: tables.describe(db, conversation_id, owner, metadata),
        )
        return _shown(await self._find(conversation_id, owner))

    async def delete(self, request: Request) -> Response:
        conversation_id, owner = _id(request), _owner(request)
        if not await self._store.write_conversation(lambda tables, db: tables.delete(db, conversation_id, owner)):
            raise conversation_not_found(conversation_id)
        return json_response(DeletedConversation(conversation_id, "conversation.deleted", deleted=True))

    async def add_items(self, request: Request) -> Response:
        include = included(read_query(request.query_params, IncludeQuery).include)
        (body, size), conversation_id, owner = await self._body(request, NewItems), _id(request), _owner(request)
        await self._find(conversation_id, owner)
        bodies = await self._store.read_conversation(lambda tables, db: tables.items(db, conversation_id))
        new = await self._new_items(request, bodies, body.items, size)
        items = [of.item for of in new]

        def write(tables: ConversationTables, db: Connection) -> int | None:
            refuse_duplicates(items, tables.ids(db, conversation_id), "items")
            return tables.append(db, conversation_id, owner, _stored(new))

        if not await self._store.write_conversation(write):
            raise conversation_not_found(conversation_id)
        return json_response(item_list(items, len(items), include))

    async def list_items(self, request: Request) -> Response:
        query = read_query(request.query_params, ItemsQuery)
        include, conversation = included(query.include), await self._find(_id(request), _owner(request))
        found = await self._store.read_conversation(lambda tables, db: tables.page(db, conversation.id, query))
        return json_response(item_list([_kept(body).item for body in found], query.limit, include))

    async def retrieve_item(self, request: Request) -> Response:
        include = included(read_query(request.query_params, IncludeQuery).include)
        conversation, item_id = await self._find(_id(request), _owner(request)), _item_id(request)
        body = await self._store.read_conversation(lambda tables, db: tables.item(db, conversation.id, item_id))
        if body is None:
            raise _no_item(item_id)
        return json_response(shown(_kept(body).item, include))

    async def delete_item(self, request: Request) -> Response:
        conversation_id, owner, item_id = _id(request), _owner(request), _item_id(request)
        conversation = await self._find(conversation_id, owner)
        if not await self._store.write_conversation(
            lambda tables, db: tables.remove(db, conversation_id, owner, item_id)
        ):
            raise _no_item(item_id)
        return _shown(conversation)

    async def _new_items(
        self, request: Request, before: Sequence[bytes], given: Sequence[Object], size: int
    ) -> list[KeptItem]:
        """The items with their types, ids and statuses. Raises APIError for those that a response could not read.

        `before`: the items of the conversation. `size`: of the request, in bytes.
        """
        found, calls = await referenced(self._store, given, "items", size, Caller.of(request.scope))

        def checked() -> list[KeptItem]:
            items = input_items(given, found, "items")
            refuse_duplicates(items, (), "items")
            _check(items, calls, [_kept(body) for body in before], self._store.seal)
            return [KeptItem(item, None if (call := calls.get(item["id"])) is None else [*call]) for item in items]

        return await run_in_thread(checked, size + sum(map(len, before)))

    async def _body(self, request: Request, kind: type[T]) -> tuple[T, int]:
        """The decoded body, and its size in bytes."""
        body = await read_body(request, self._max_body_bytes)
        return await decode(body, kind, request.scope), len(body)

    async def _find(self, conversation_id: str, owner: str) -> StoredConversation:
        """Raises APIError."""
        found = await self._store.read_conversation(lambda tables, db: tables.get(db, conversation_id, owner))
        if found is None:
            raise conversation_not_found(conversation_id)
        return found


def _owner(request: Request) -> str:
    return Caller.of(request.scope).name


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _item_id(request: Request) -> str:
    return str(request.path_params["item_id"])


def _no_item(item_id: str) -> APIError:
    return not_found(f"The conversation has no item '{item_id}'.", "item_not_found")


def _kept(body: bytes) -> KeptItem:
    return msgspec.json.decode(body, type=KeptItem)


def _check(items: list[Object], calls: Mapping[str, Sequence[str]], before: Sequence[KeptItem], seal: Seal) -> None:
    """Raises APIError for items that a response could not read. `calls`: as in ItemHistory.add."""
    earlier = [of.item for of in before]
    tools = ClientTools((), [*new_tools(earlier, "conversation"), *new_tools(items, "items")])
    history = ItemHistory(tools, seal)
    history.add(earlier, {of.item["id"]: of.call for of in before if of.call is not None}, "conversation", kept=True)
    history.add(items, calls, "items")


def _stored(items: Sequence[KeptItem]) -> list[tuple[str, bytes]]:
    return [(of.item["id"], msgspec.json.encode(of)) for of in items]


def _shown(found: StoredConversation) -> Response:
    return json_response(ConversationObject(found.id, "conversation", int(found.created_s), found.metadata))
