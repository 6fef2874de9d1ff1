"""Every endpoint of OpenAI's and Anthropic's APIs beyond plain answers, asked by their clients at a real server.

All that the server sends is compared with the clients' types. What the model writes is a script.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx2
import openai
import pydantic
import pytest
from anthropic.types import CompactionSignatureInvalidError
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageStreamEvent
from anthropic.types.beta_error_response import BetaErrorResponse
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import (
    Batch,
    Completion,
    CompletionChoice,
    FileDeleted,
    FileObject,
    Model,
    VectorStore,
    VectorStoreDeleted,
    VectorStoreSearchResponse,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses import (
    CompactedResponse,
    Response,
    ResponseItem,
    ResponseItemList,
    ResponsesServerEvent,
    ResponseStreamEvent,
)
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.vector_stores import (
    FileContentResponse,
    VectorStoreFile,
    VectorStoreFileBatch,
    VectorStoreFileDeleted,
)

from oscine.types import GenerationOutput, GenerationRequest
from tests.conformance.exact_types import violations
from tests.extensions.apis.socket_server import SocketServer
from tests.waiting import wait_until

Json = dict[str, Any]


class Compacted(CompactedResponse):
    """With the user's messages that OpenAI's reference has in it."""

    output: list[ResponseItem]  # type: ignore[assignment]


class _UnfinishedChoice(CompletionChoice):
    """The package has whole answers alone: in OpenAI's streams the reason is null until the end."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[_UnfinishedChoice]  # type: ignore[assignment]


class _CustomInput(pydantic.BaseModel, extra="forbid"):
    name: str | None = None
    input: str | None = None


class _CustomDelta(pydantic.BaseModel, extra="forbid"):
    """A custom call in a stream, for which the package has no type: as the call of a whole answer."""

    index: int
    id: str | None = None
    type: Literal["custom"] | None = None
    custom: _CustomInput


class _Delta(ChoiceDelta):
    tool_calls: list[_CustomDelta | ChoiceDeltaToolCall] | None = None  # type: ignore[assignment]


class _ChunkChoice(ChunkChoice):
    delta: _Delta


class ChatChunk(ChatCompletionChunk):
    choices: list[_ChunkChoice]  # type: ignore[assignment]


class Nested(pydantic.BaseModel, extra="allow"):
    items: list[ResponseItem]


class DeletedResponse(pydantic.BaseModel, extra="forbid"):
    """For which the package has no type."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


ID = "[a-z]+[_-][A-Za-z0-9_-]+"
# By method and path: the type of an answer, and of the events of a stream
ROUTES: dict[str, tuple[Any, Any]] = {
    "GET /v1/models": (SyncPage[Model], None),
    "GET /v1/models/fake": (Model, None),
    "POST /v1/chat/completions": (ChatCompletion, ChatChunk),
    "POST /v1/completions": (Completion, CompletionChunk),
    "POST /v1/files": (FileObject, None),
    "GET /v1/files": (SyncCursorPage[FileObject], None),
    f"GET /v1/files/{ID}": (FileObject, None),
    f"DELETE /v1/files/{ID}": (FileDeleted, None),
    "POST /v1/batches": (Batch, None),
    "GET /v1/batches": (SyncCursorPage[Batch], None),
    f"GET /v1/batches/{ID}": (Batch, None),
    f"POST /v1/batches/{ID}/cancel": (Batch, None),
    "POST /v1/vector_stores": (VectorStore, None),
    "GET /v1/vector_stores": (SyncCursorPage[VectorStore], None),
    f"GET /v1/vector_stores/{ID}": (VectorStore, None),
    f"POST /v1/vector_stores/{ID}": (VectorStore, None),
    f"DELETE /v1/vector_stores/{ID}": (VectorStoreDeleted, None),
    f"POST /v1/vector_stores/{ID}/search": (SyncPage[VectorStoreSearchResponse], None),
    f"POST /v1/vector_stores/{ID}/files": (VectorStoreFile, None),
    f"GET /v1/vector_stores/{ID}/files": (SyncCursorPage[VectorStoreFile], None),
    f"GET /v1/vector_stores/{ID}/files/{ID}": (VectorStoreFile, None),
    f"POST /v1/vector_stores/{ID}/files/{ID}": (VectorStoreFile, None),
    f"DELETE /v1/vector_stores/{ID}/files/{ID}": (VectorStoreFileDeleted, None),
    f"GET /v1/vector_stores/{ID}/files/{ID}/content": (SyncPage[FileContentResponse], None),
    f"POST /v1/vector_stores/{ID}/file_batches": (VectorStoreFileBatch, None),
    f"GET /v1/vector_stores/{ID}/file_batches/{ID}": (VectorStoreFileBatch, None),
    f"POST /v1/vector_stores/{ID}/file_batches/{ID}/cancel": (VectorStoreFileBatch, None),
    f"GET /v1/vector_stores/{ID}/file_batches/{ID}/files": (SyncCursorPage[VectorStoreFile], None),
    "POST /v1/responses": (Response, ResponseStreamEvent),
    f"GET /v1/responses/{ID}": (Response, ResponseStreamEvent),
    f"DELETE /v1/responses/{ID}": (DeletedResponse, None),
    f"POST /v1/responses/{ID}/cancel": (Response, None),
    f"GET /v1/responses/{ID}/input_items": (ResponseItemList, None),
    "POST /v1/responses/input_tokens": (InputTokenCountResponse, None),
    "POST /v1/responses/compact": (Compacted, None),
    "POST /v1/conversations": (Conversation, None),
    f"GET /v1/conversations/{ID}": (Conversation, None),
    f"POST /v1/conversations/{ID}": (Conversation, None),
    f"DELETE /v1/conversations/{ID}": (ConversationDeletedResource, None),
    f"POST /v1/conversations/{ID}/items": (ConversationItemList, None),
    f"GET /v1/conversations/{ID}/items": (ConversationItemList, None),
    f"GET /v1/conversations/{ID}/items/{ID}": (ConversationItem, None),
    f"DELETE /v1/conversations/{ID}/items/{ID}": (Conversation, None),
    "POST /v1/messages": (BetaMessage, BetaRawMessageStreamEvent),
    "POST /v1/messages/count_tokens": (BetaMessageTokensCount, None),
}


class Checked:
    """Reads each answer that a client receives."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.seen: Counter[tuple[str, bool]] = Counter()

    @property
    def hooks(self) -> dict[str, list[Any]]:
        return {"response": [self.read]}

    def read(self, response: httpx2.Response) -> None:
        response.read()
        asked = f"{response.request.method} {response.request.url.path}"
        if response.status_code != 200:
            kind = BetaErrorResponse if "/messages" in asked else None
            self._compare(kind, response.text, asked) if kind else self._error(response.json(), asked)
            return
        (route,) = [route for route in ROUTES if re.fullmatch(route, asked)] or [asked]
        streamed = response.headers["content-type"].startswith("text/event-stream")
        self.seen[route, streamed] += 1
        if not streamed:
            self._compare(ROUTES[route][0], response.text, asked)
            return
        for line in response.text.splitlines():
            if line.startswith("data: ") and line not in ("data: [DONE]", 'data: {"type":"ping"}'):
                self._compare(ROUTES[route][1], line.removeprefix("data: "), asked)

    def event(self, event: Json) -> None:
        """Of a WebSocket."""
        self._compare(ResponsesServerEvent, json.dumps(event), "a WebSocket")

    def _error(self, body: Json, asked: str) -> None:
        if {*body} != {"error"} or {*body["error"]} != {"message", "type", "param", "code"}:
            self.wrong.append(f"{asked}: {body}")

    def _compare(self, kind: Any, text: str, asked: str) -> None:
        self.wrong += [f"{asked}: {one}" for one in violations(kind, text)]


def plays(server: SocketServer, *turns: tuple[str | int, ...]) -> None:
    """One for each request to the engine, two tokens at a time."""
    t, left = server.tokenizer, [*turns]

    def script(request: GenerationRequest) -> Iterator[GenerationOutput]:
        ids = [i for part in left.pop(0) for i in ([part] if isinstance(part, int) else t.encode(part))]
        for i in range(0, len(ids) - 2, 2):
            yield GenerationOutput(request.request_id, ids[i : i + 2])
        yield GenerationOutput(request.request_id, ids[-2 + len(ids) % 2 :], finish_reason="stop")

    server.engine.script = script


def hangs(server: SocketServer, text: str) -> None:
    """Each request says this and goes on until it is cancelled."""
    t = server.tokenizer
    ids = [i for part in said(server, text)[:-1] for i in ([part] if isinstance(part, int) else t.encode(part))]
    server.engine.script = lambda request: [GenerationOutput(request.request_id, ids)]


def said(server: SocketServer, text: str) -> tuple[str | int, ...]:
    t = server.tokenizer
    thought = (t.channel, "analysis", t.message, "Hm.", t.end, t.start, "assistant")
    return (*thought, t.channel, "final", t.message, text, t.return_)


def called(server: SocketServer, to: str, arguments: str) -> tuple[str | int, ...]:
    t = server.tokenizer
    thought = (t.channel, "analysis", t.message, "Hm.", t.end, t.start, "assistant")
    return (*thought, t.channel, f"commentary to={to} ", t.constrain, "json", t.message, arguments, t.call)


def custom(syntax: str, definition: str) -> Any:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}


GRAMMARS = [custom("lark", "start: /[ab]+/"), custom("regex", "[ab]+"), {"type": "custom", "name": "patch"}]
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
WEATHER: Any = {**ADD, "name": "weather", "defer_loading": True}
FIND: Any = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": ADD["parameters"],
}
HI: Any = {"type": "message", "role": "user", "content": "My name is Anna."}
COMPACT: Any = [{"type": "compaction", "compact_threshold": 1}]


def answers(client: openai.OpenAI, given: Any, **body: Any) -> Iterator[Response]:
    """Whole, and streamed."""
    yield client.responses.create(model="fake", input=given, **body)
    *_, last = client.responses.create(model="fake", input=given, stream=True, **body)
    assert last.type == "response.completed", last
    yield last.response


def files_stores_and_searches(server: SocketServer, client: openai.OpenAI) -> None:
    stores, upload = client.vector_stores, client.files.create
    notes = b"# Birds\nA wren is a small brown bird that sings.\n"
    first = upload(file=("birds.md", notes), purpose="assistants")
    second = upload(
        file=("empty.md", b" "), purpose="assistants", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    client.files.retrieve(first.id)
    assert len(client.files.list().data) == 2
    days: Any = {"anchor": "last_active_at", "days": 2}
    static: Any = {"type": "static", "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50}}
    store = stores.create(name="Birds", description="of a garden", metadata={"a": "b"}, expires_after=days)
    plain = stores.create()
    added = stores.files.create_and_poll(
        first.id,
        vector_store_id=store.id,
        attributes={"kind": "bird", "year": 2020, "old": True},
        chunking_strategy=static,
    )
    assert added.status == "completed"
    failed = stores.files.create_and_poll(second.id, vector_store_id=store.id)
    assert (failed.status, failed.last_error is not None) == ("failed", True)
    stores.files.update(first.id, vector_store_id=store.id, attributes={"kind": "wren"})
    assert len(stores.files.list(store.id).data) == 2
    assert "wren" in str(stores.files.content(first.id, vector_store_id=store.id).data[0].text)
    batch = stores.file_batches.create_and_poll(plain.id, file_ids=[first.id, second.id])
    assert (batch.file_counts.completed, batch.file_counts.failed) == (1, 1)
    stores.file_batches.list_files(batch.id, vector_store_id=plain.id)
    stores.file_batches.cancel(batch.id, vector_store_id=plain.id)
    assert stores.retrieve(store.id).file_counts.total == 2
    stores.update(store.id, name=None, metadata={})
    assert {one.id for one in stores.list()} == {store.id, plain.id}
    (hit,) = stores.search(
        store.id, query=["brown bird", "wren"], filters={"type": "eq", "key": "kind", "value": "wren"}
    )
    assert hit.filename == "birds.md"

    tools: Any = [{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 3}]
    search = called(server, "file_search.search", '{"queries": ["bird"]}')
    include: Any = ["file_search_call.results"]
    shown: list[Any] = [include, []]
    for told in shown:
        turn = (search, said(server, "A wren【0:0†birds.md】 sings."))
        plays(server, *turn, *turn)
        for response in answers(client, "Which bird?", tools=tools, include=told):
            assert [item.type for item in response.output] == ["reasoning", "file_search_call", "reasoning", "message"]
            part: Any = response.output[-1]
            assert part.content[0].annotations[0].filename == "birds.md"
            items = client.responses.input_items.list(response.id).data
            assert items
            plays_on = said(server, "Yes.")
            plays(server, plays_on)
            history: Any = [*response.output, HI]
            client.responses.create(model="fake", input=history, tools=tools)
            plays(server, *turn)
    plays(server, called(server, "file_search.search", "no json"), said(server, "Nothing."))
    client.responses.create(model="fake", input="Which bird?", tools=tools)
    stores.files.delete(first.id, vector_store_id=store.id)
    stores.delete(store.id)
    client.files.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        stores.retrieve(store.id)


def calls_of_tools_and_what_is_kept_of_them(server: SocketServer, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[HI], metadata={"a": "b"})
    for tool in (*GRAMMARS, ADD, FIND):
        name = tool.get("name", tool["type"])
        turn = called(server, f"functions.{name}", '{"a": 1}' if tool in (ADD, FIND) else "ab")
        plays(server, turn, turn, said(server, "Done."))
        tools = [tool, WEATHER] if tool is FIND else [tool]
        for response in answers(client, "Do it.", tools=tools, tool_choice="auto"):
            call: Any = response.output[-1]
        outputs: dict[str, Any] = {
            "function_call": {"type": "function_call_output", "output": "2"},
            "custom_tool_call": {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ok"}]},
            "tool_search_call": {"type": "tool_search_output", "execution": "client", "tools": [WEATHER]},
        }
        given: Any = [*response.output, {**outputs[call.type], "call_id": call.call_id}]
        done = client.responses.create(model="fake", input=given, tools=tools, conversation=conversation.id)
        client.responses.input_items.list(done.id)
        kept = client.responses.retrieve(done.id, include=["message.input_image.image_url"])
        assert kept == done
    items = client.conversations.items
    more: Any = [{**HI, "role": "developer"}, {"role": "user", "content": "And?"}]
    items.create(conversation.id, items=more)
    kinds = {item.type for item in items.list(conversation.id, limit=100)}
    assert kinds >= {"message", "reasoning", "custom_tool_call", "custom_tool_call_output", "function_call"}
    assert kinds >= {"function_call_output", "tool_search_call", "tool_search_output"}
    for item in items.list(conversation.id, limit=100):
        items.retrieve(str(item.id), conversation_id=conversation.id)
    items.delete(str(item.id), conversation_id=conversation.id)
    client.conversations.retrieve(conversation.id)
    client.conversations.update(conversation.id, metadata={"c": "d"})
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def compaction_counts_and_the_background(server: SocketServer, client: openai.OpenAI) -> None:
    talk: Any = [HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And?"}]
    assert client.responses.input_tokens.count(model="fake", input=talk, tools=[ADD]).input_tokens > 10
    plays(server, said(server, "Her name is Anna."))
    compacted = client.responses.with_raw_response.compact(model="fake", input=talk).http_response.json()["output"]
    whole = (said(server, "Anna asks."), said(server, "Hello, Anna."))
    plays(server, *whole, *whole, *whole)
    for response in answers(client, talk, context_management=COMPACT):
        assert [item.type for item in response.output] == ["compaction", "reasoning", "message"]
    conversation = client.conversations.create()
    client.responses.create(
        model="fake", input=[*compacted, *talk], context_management=COMPACT, conversation=conversation.id
    )
    client.conversations.items.list(conversation.id)
    plays(server, said(server, "Anna."), said(server, "Anna."))
    for response in answers(client, [*talk, {"type": "compaction_trigger"}]):
        assert [item.type for item in response.output] == ["compaction"]
    plays(server, said(server, "Later."))
    behind = client.responses.create(model="fake", input="hi", background=True, stream=True)
    response_id = next(event.response.id for event in behind if event.type == "response.created")
    client.responses.cancel(response_id)
    list(client.responses.retrieve(response_id, stream=True, starting_after=1))
    client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)
    for tools in ([], [{"type": "function", "name": "add", "parameters": None, "strict": None}]):
        hangs(server, "Half of")
        asked: Any = {"model": "fake", "input": "hi", "background": True, "tools": tools, "metadata": {"a": "b"}}
        response_id = client.responses.create(**asked).id

        def has_begun(response_id: str = response_id) -> bool:
            return bool(client.responses.retrieve(response_id).output)

        wait_until(has_begun, "the beginning of the answer")
        assert client.responses.cancel(response_id).status == "cancelled"
        stored = client.responses.retrieve(response_id)
        assert (stored.status, [item.type for item in stored.output]) == ("cancelled", ["reasoning", "message"])
        list(client.responses.retrieve(response_id, stream=True))
        client.responses.input_items.list(response_id)
    with pytest.raises(openai.BadRequestError):
        client.responses.compact(model="fake", input=[{"type": "compaction", "encrypted_content": "x"}])


def plain_answers_and_batches(server: SocketServer, client: openai.OpenAI) -> None:
    client.models.list()
    client.models.retrieve("fake")
    chat = client.chat.completions
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": grammar}}]
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    turn = called(server, "functions.patch", "ab")
    plays(server, turn, turn)
    assert chat.create(**asked).choices[0].finish_reason == "tool_calls"
    *_, last = chat.create(**asked, stream=True)
    assert last.choices[0].finish_reason == "tool_calls"
    plays(server, called(server, "functions.add", "{}"), *[said(server, "Yes.")] * 3)
    asked["tools"] = [{"type": "function", "function": {"name": "add"}}]
    list(chat.create(**asked, stream=True, stream_options={"include_usage": True}))
    text: Any = {"model": "fake", "prompt": "hi", "logprobs": 1}
    client.completions.create(**text)
    *_, end, usage = client.completions.create(**text, stream=True, stream_options={"include_usage": True})
    assert (end.choices[0].finish_reason, usage.choices) == ("stop", [])
    line = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"model": "fake", "input": "hi"}}
    plays(server, said(server, "Yes."))
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h", metadata={"a": "b"}
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    hangs(server, "Half of")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", "the beginning of the batch")
    client.batches.cancel(batch.id)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled", "the end of the batch")
    assert client.batches.list().data


def events_of_websockets(server: SocketServer, checked: Checked) -> None:
    with server.connect() as socket:
        for body in (
            {"stream_id": "a"},
            {"context_management": COMPACT},
            {"tools": [GRAMMARS[0]]},
            {"generate": False},
        ):
            turns = [said(server, "Yes.")] * 2
            plays(server, *([called(server, "functions.patch", "ab")] if "tools" in body else turns))
            socket.create(input="hi", **body)
            for event in socket.events():
                checked.event(event)
            assert event["type"] == "response.completed", event
        socket.send(type="response.steer", previous_response_id="resp_none", input="x")
        socket.create(input=1)
        socket.create(input="hi", previous_response_id="resp_none")
        socket.connection.send("[]")
        for _ in range(4):
            checked.event(socket.event())


def messages_their_counts_and_compaction(server: SocketServer, claude: anthropic.Anthropic) -> None:
    talk: Any = [{"role": "user", "content": "My name is Anna."}]
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    given: Any = {"model": "fake", "messages": talk, "system": "Be kind.", "tools": tools}
    assert claude.messages.count_tokens(**given).input_tokens == claude.beta.messages.count_tokens(**given).input_tokens
    edits: Any = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}]}
    beta = claude.beta.messages
    for body in (
        {"context_management": edits},
        {"compaction": {"type": "summarize"}},
        {"thinking": {"type": "adaptive"}},
    ):
        for streamed in (False, True):
            plays(server, said(server, "Anna asks."), said(server, "Hello."))
            made = beta.create(**given, max_tokens=100, extra_body=body, stream=streamed)
            if streamed:
                list(made)
    plays(server, called(server, "functions.add", "{}"))
    assert beta.create(**given, max_tokens=100).stop_reason == "tool_use"
    wrong: Any = [{"role": "assistant", "content": [{"type": "compaction", "content": "a", "signature": "x"}]}, *talk]
    with pytest.raises(CompactionSignatureInvalidError):
        beta.create(model="fake", messages=wrong, max_tokens=100)
    with pytest.raises(anthropic.BadRequestError):
        beta.count_tokens(model="fake", messages=[])


def test_all_that_is_sent_is_what_the_types_say(model_folder: Path) -> None:
    checked = Checked()
    with (
        SocketServer(model_folder, files_dir=":temporary:") as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.Client(event_hooks=checked.hooks),
        ) as client,
        anthropic.Anthropic(
            base_url=server.url,
            api_key="none",
            max_retries=0,
            http_client=httpx2.Client(event_hooks=checked.hooks),
        ) as claude,
    ):
        files_stores_and_searches(server, client)
        calls_of_tools_and_what_is_kept_of_them(server, client)
        compaction_counts_and_the_background(server, client)
        plain_answers_and_batches(server, client)
        events_of_websockets(server, checked)
        messages_their_counts_and_compaction(server, claude)
    assert not checked.wrong, "\n".join(dict.fromkeys(checked.wrong))
    expected = {(route, streamed) for route, kinds in ROUTES.items() for streamed in (False, True) if kinds[streamed]}
    assert expected == {*checked.seen}


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Conversation, {"id": "a", "object": "conversation", "created_at": 1, "metadata": {}}, []),
        (Conversation, {"id": "a", "object": "conversation", "metadata": {}}, ["created_at: Field required"]),
        (VectorStoreDeleted, {"id": "a", "deleted": True, "object": "x"}, ["object: Input should be"]),
        (InputTokenCountResponse, {"input_tokens": 1.5, "object": "response.input_tokens"}, ["input_tokens: "]),
        (
            Nested,
            {"items": [{"id": "a", "type": "compaction", "encrypted_content": "b", "more": 1}]},
            ["Nested.items[0]: ResponseCompactionItem has no field 'more'"],
        ),
        (Nested, {"items": [{"id": "a", "type": "compaction"}]}, ["encrypted_content: Field required"]),
    ],
)
def test_each_violation_is_found(kind: Any, given: Json, words: list[str]) -> None:
    found = violations(kind, json.dumps(given))
    assert len(found) == len(words)
    assert all(said in one for said, one in zip(words, found, strict=True)), found
