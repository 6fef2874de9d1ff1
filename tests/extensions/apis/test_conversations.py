"""The Conversations API with OpenAI's client, over a scripted engine."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
from openai.types.conversations import Conversation, ConversationItem

from oscine.api.app import create_app
from oscine.extensions.apis.responses.api import responses_of
from tests.api.scripted_server import ScriptedServer

T = TypeVar("T")
Json = dict[str, Any]
Work = Callable[[openai.AsyncOpenAI], Awaitable[T]]
HI: Any = {"type": "message", "role": "user", "content": "My name is Anna."}
ANSWER = "Hello, Anna."


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, api_keys=("mine", "yours")) as server:
        yield server


def ask(server: ScriptedServer, work: Work[T], key: str = "mine") -> T:
    async def run() -> T:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(server.service)))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0
        ) as client:
            return await work(client)

    return server.run(run())


def says(server: ScriptedServer, text: str = ANSWER, thought: str = "") -> None:
    t = server.tokenizer
    before = (t.channel, "analysis", t.message, thought, t.end, t.start, "assistant") if thought else ()
    server.says(*before, t.channel, "final", t.message, text, t.return_)


def prompt_of(server: ScriptedServer) -> str:
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def new(server: ScriptedServer, *items: Any, **more: Any) -> Conversation:
    return ask(server, lambda client: client.conversations.create(items=[*items], **more))


async def _items(client: openai.AsyncOpenAI, conversation: str, **query: Any) -> list[ConversationItem]:
    return [item async for item in client.conversations.items.list(conversation, **query)]


def items_of(server: ScriptedServer, conversation: str, **query: Any) -> list[Any]:
    return ask(server, lambda client: _items(client, conversation, **query))


def respond(server: ScriptedServer, conversation: Any, given: Any, **body: Any) -> Any:
    fields = {"model": server.service.names[0], "input": given, "conversation": conversation, **body}
    return ask(server, lambda client: client.responses.create(**fields))


def texts(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items if item.type == "message"]


def test_a_conversation_from_its_beginning_to_its_end(server: ScriptedServer) -> None:
    made = new(server, HI, metadata={"topic": "names"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "names"})
    assert made.id.startswith("conv_")
    assert ask(server, lambda client: client.conversations.retrieve(made.id)) == made
    changed = ask(server, lambda client: client.conversations.update(made.id, metadata={"topic": "sums"}))
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"topic": "sums"})
    deleted = ask(server, lambda client: client.conversations.delete(made.id))
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    gone: list[Work[Any]] = [
        lambda client: client.conversations.retrieve(made.id),
        lambda client: client.conversations.delete(made.id),
        lambda client: client.conversations.update(made.id, metadata={}),
        lambda client: client.conversations.items.create(made.id, items=[HI]),
    ]
    for work in gone:
        with pytest.raises(openai.NotFoundError):
            ask(server, work)
    assert items_of(server, new(server).id) == []


def test_items_are_added_listed_and_deleted(server: ScriptedServer) -> None:
    made = new(server, *({**HI, "content": str(number)} for number in range(5)))
    added = ask(server, lambda client: client.conversations.items.create(made.id, items=[{**HI, "content": "5"}]))
    assert (added.object, added.has_more, texts(added.data)) == ("list", False, ["5"])
    expected = [*map(str, range(6))]
    for limit in (1, 2, 4, 100):
        assert texts(items_of(server, made.id, order="asc", limit=limit)) == expected
        assert texts(items_of(server, made.id, limit=limit)) == expected[::-1]
    with pytest.raises(openai.BadRequestError, match="there is no object 'msg_other'"):
        items_of(server, made.id, after="msg_other")
    third = items_of(server, made.id, order="asc")[3]
    found = ask(server, lambda client: client.conversations.items.retrieve(third.id, conversation_id=made.id))
    assert found == third
    left = ask(server, lambda client: client.conversations.items.delete(third.id, conversation_id=made.id))
    assert left == made
    assert texts(items_of(server, made.id, order="asc")) == ["0", "1", "2", "4", "5"]
    assert texts(items_of(server, made.id, order="asc", after=third.id)) == ["4", "5"]
    assert texts(items_of(server, made.id, after=third.id)) == ["2", "1", "0"]
    gone: list[Work[Any]] = [
        lambda client: client.conversations.items.retrieve(third.id, conversation_id=made.id),
        lambda client: client.conversations.items.delete(third.id, conversation_id=made.id),
    ]
    for work in gone:
        with pytest.raises(openai.NotFoundError):
            ask(server, work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_a_response_continues_its_conversation(server: ScriptedServer, *, stream: bool, store: bool) -> None:
    made = new(server, {"role": "developer", "content": "Be brief."})
    says(server, thought="A greeting.")

    async def first(client: openai.AsyncOpenAI) -> Any:
        body: Json = {"model": server.service.names[0], "input": [HI], "store": store, "conversation": made.id}
        if not stream:
            return await client.responses.create(**body)
        events = [event async for event in await client.responses.create(stream=True, **body)]
        return events[-1].response

    answer = ask(server, first)
    assert answer.conversation.id == made.id
    kinds = [item.type for item in items_of(server, made.id, order="asc")]
    assert kinds == ["message", "message", "reasoning", "message"]
    says(server, "Anna.")
    again = respond(server, {"id": made.id}, "Who am I?")
    prompt = prompt_of(server)
    places = [prompt.index(text) for text in ("Be brief.", "My name is Anna.", ANSWER, "Who am I?")]
    assert places == sorted(places)
    listed = items_of(server, made.id, order="asc")
    assert texts(listed) == ["Be brief.", "My name is Anna.", ANSWER, "Who am I?", "Anna."]
    assert listed[-1].id == again.output[-1].id
    counted = ask(server, lambda client: client.responses.input_tokens.count(input="And?", conversation=made.id))
    respond(server, made.id, "And?")
    assert counted.input_tokens == len(server.engine.requests[-1].prompt_token_ids)


def test_a_call_is_answered_in_the_conversation(server: ScriptedServer) -> None:
    t, made = server.tokenizer, new(server)
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    server.says(t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, "{}", t.call)
    call = respond(server, made.id, "27 + 58?", tools=tools).output[-1]
    says(server, "85")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "85"}]
    respond(server, made.id, output, tools=tools)
    called = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
    assert f"{called}<|start|>functions.add to=assistant<|channel|>commentary<|message|>85<|end|>" in prompt_of(server)
    kinds = [item.type for item in items_of(server, made.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "85"}
SEARCH = {"type": "tool_search_call", "call_id": "s", "arguments": {}}
FOUND = {"type": "tool_search_output", "call_id": "s", "tools": []}
ASKED = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s", "name": "f", "arguments": "{}"}
REFUSED = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False}


@pytest.mark.parametrize(
    ("call", "result", "order", "called"),
    [
        (CALL, RESULT, (1, 2), [False, False]),
        (CALL, RESULT, (2, 1), [True, False]),
        (SEARCH, FOUND, (1, 2), [False, False]),
        (ASKED, REFUSED, (1, 2), [False, False]),
    ],
)
def test_a_call_and_its_result_are_deleted_in_either_order(
    server: ScriptedServer, call: Json, result: Json, order: tuple[int, int], called: list[bool]
) -> None:
    """A result without its call is left out of the prompt, and a call without its result stays."""
    made = new(server, HI, call, result)
    listed, seen = items_of(server, made.id, order="asc"), []

    def delete(index: int) -> Work[Any]:
        return lambda client: client.conversations.items.delete(listed[index].id, conversation_id=made.id)

    def add(item: Any) -> Work[Any]:
        return lambda client: client.conversations.items.create(made.id, items=[item])

    for index in order:
        ask(server, delete(index))
        says(server)
        respond(server, made.id, "And?", store=False)
        seen.append("functions.add" in prompt_of(server))
        assert "85" not in prompt_of(server)
        ask(server, add(HI))
    assert seen == called
    with pytest.raises(openai.BadRequestError, match="before it has the id"):
        ask(server, add(result))


def test_a_response_in_the_background_continues_it(server: ScriptedServer) -> None:
    made = new(server)
    says(server)
    begun = respond(server, made.id, "hi", background=True)

    async def ended(client: openai.AsyncOpenAI) -> Any:
        async for _ in await client.responses.retrieve(begun.id, stream=True):
            pass
        return await client.responses.retrieve(begun.id)

    assert ask(server, ended).status == "completed"
    assert texts(items_of(server, made.id, order="asc")) == ["hi", ANSWER]


def test_what_is_refused_leaves_the_conversation_alone(server: ScriptedServer) -> None:
    made = new(server, HI)
    with pytest.raises(openai.BadRequestError):
        respond(server, made.id, "x" * 3000)
    assert texts(items_of(server, made.id)) == ["My name is Anna."]


def test_a_conversation_that_is_deleted_meanwhile_is_not_named(server: ScriptedServer) -> None:
    """Writes are in order: the deletion is asked for before the response begins, which is long before it ends."""
    made, store, tasks = new(server), responses_of(server.service).kept.store, []
    says(server)
    script = server.engine.script

    def deleting(request: Any) -> Any:
        owner = request.tenant
        delete = store.write_conversation(lambda tables, db: tables.delete(db, made.id, owner))
        tasks.append(asyncio.get_running_loop().create_task(delete))
        return script(request)

    server.engine.script = deleting
    assert respond(server, made.id, "hi").conversation is None
    assert len(tasks) == 1


def test_another_key_finds_no_conversation(server: ScriptedServer) -> None:
    made = new(server, HI)
    (item,) = items_of(server, made.id)
    model = server.service.names[0]
    tries: list[Work[Any]] = [
        lambda client: client.conversations.retrieve(made.id),
        lambda client: client.conversations.update(made.id, metadata={}),
        lambda client: client.conversations.delete(made.id),
        lambda client: _items(client, made.id),
        lambda client: client.conversations.items.create(made.id, items=[HI]),
        lambda client: client.conversations.items.retrieve(item.id, conversation_id=made.id),
        lambda client: client.conversations.items.delete(item.id, conversation_id=made.id),
        lambda client: client.responses.create(model=model, input="Who am I?", conversation=made.id),
        lambda client: client.responses.input_tokens.count(input="Who am I?", conversation=made.id),
    ]
    for work in tries:
        with pytest.raises(openai.NotFoundError) as caught:
            ask(server, work, "yours")
        assert caught.value.code == "conversation_not_found"
    assert items_of(server, made.id) == [item]


PICTURE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
WRONG: list[tuple[str, Json, str]] = [
    ("", {"items": [{"type": "dance"}]}, "items[0].type"),
    ("", {"items": [PICTURE]}, "items[0].content[0].type"),
    ("", {"items": [RESULT]}, "items[0].call_id"),
    ("", {"items": [HI] * 21}, "items"),
    ("", {"metadata": {"a": 1}}, "metadata"),
    ("/{id}", {}, "metadata"),
    ("/{id}/items", {}, "items"),
    ("/{id}/items", {"items": [HI, {"id": "msg_0"}]}, "items[1].id"),
    ("/{id}/items?include=all", {"items": [HI]}, "include[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_what_is_wrong_is_named(server: ScriptedServer, path: str, body: Json, param: str) -> None:
    made = new(server, HI)
    at = f"/v1/conversations{path.format(id=made.id)}"
    refused = server.request("POST", at, body, {"Authorization": "Bearer mine"})
    assert refused.status_code == 400, refused.text
    assert str(refused.json()["error"]["param"]).startswith(param)
    assert texts(items_of(server, made.id)) == ["My name is Anna."]


def test_a_conversation_does_not_stand_beside_an_earlier_response(server: ScriptedServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(server, new(server).id, "hi", previous_response_id="resp_1")
    assert caught.value.param == "conversation"
