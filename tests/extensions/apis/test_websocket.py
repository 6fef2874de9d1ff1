"""WebSocket mode of the Responses API: the real server, and clients of `websockets` and of `openai`."""

import gc
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from oscine.api.common import memory
from oscine.extensions.apis.websocket import connection as limits
from oscine.types import GenerationOutput
from tests.extensions.apis.response_stream import check_stream, parse
from tests.extensions.apis.socket_server import Client, Json, SocketServer
from tests.extensions.apis.test_response_input import ADD
from tests.server import ServerProcess
from tests.waiting import wait_until

EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
USER: Json = {"role": "user", "content": "My name is Alice."}


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[SocketServer]:
    with SocketServer(model_folder) as server:
        yield server


@pytest.fixture
def client(server: SocketServer) -> Iterator[Client]:
    with server.connect() as client:
        yield client


def checked(events: list[Json]) -> list[Json]:
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    return events


def without_ids(events: list[Json]) -> Any:
    """What two streams of the same answer have in common: ids and times are their own."""
    own = {"id", "item_id", "call_id", "created_at", "completed_at", "previous_response_id"}

    def same(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: same(of) for name, of in value.items() if name not in own}
        return [same(of) for of in value] if isinstance(value, list) else value

    return same(events)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi"},
        {"input": "hi", "instructions": "Be brief.", "reasoning": {"summary": "auto"}, "metadata": {"a": "b"}},
        {"input": "hi", "context_management": [{"type": "compaction", "compact_threshold": 1}]},
        {"input": "hi", "max_output_tokens": 7, "store": False},
    ],
)
def test_events_are_those_of_a_stream(server: SocketServer, client: Client, body: Json) -> None:
    server.saying(*["Hello, Alice."] * 4)
    client.create(**body)
    events = checked(client.events())
    check_stream(events)
    streamed = parse(server.post("/v1/responses", {"model": "fake", "stream": True, **body}).text)
    assert without_ids(events) == without_ids(streamed)


def test_a_call_and_its_result_go_over_one_connection(server: SocketServer, client: Client) -> None:
    t = server.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, '{"a": 1}', t.call)
    ids = [i for part in call for i in ([part] if isinstance(part, int) else t.encode(part))]
    server.engine.script = lambda request: [GenerationOutput(request.request_id, ids, finish_reason="stop")]
    made = client.respond(input="1 + 1?", tools=[ADD], store=False)
    (item,) = made["output"]
    server.saying("Two.")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
    made = client.respond(input=[result], tools=[ADD], store=False, previous_response_id=made["id"])
    assert made["output"][-1]["content"][0]["text"] == "Two."
    assert '{"a": 1}<|call|>' in server.prompt()
    assert "1 + 1?" in server.prompt()


def test_what_is_not_stored_is_known_to_its_connection_alone(server: SocketServer, client: Client) -> None:
    server.saying(*["Noted."] * 4)
    first = client.respond(input=[USER], store=False)
    second = client.respond(input="And?", store=False, previous_response_id=first["id"])
    client.respond(input="So?", store=False, previous_response_id=second["id"])
    assert server.prompt().count("Alice") == 1
    assert server.post("/v1/responses", {"input": "x", "previous_response_id": first["id"]}).status_code == 404
    with server.connect() as other:
        error = other.refused(input="x", previous_response_id=second["id"])
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert error["error"]["param"] == "previous_response_id"
        checked([error])
    fork = client.respond(input="Fork.", previous_response_id=first["id"])  # which is stored
    assert "And?" not in server.prompt()
    assert fork["previous_response_id"] == first["id"]


def test_what_is_stored_is_known_to_all(server: SocketServer, client: Client) -> None:
    server.saying(*["Noted."] * 3)
    first = client.respond(input=[USER])
    with server.connect() as other:
        other.respond(input="Who am I?", previous_response_id=first["id"])
    assert "Alice" in server.prompt()
    assert server.post("/v1/responses", {"input": "x", "previous_response_id": first["id"]}).status_code == 200


def test_a_failed_continuation_forgets_what_it_continued(server: SocketServer, client: Client) -> None:
    server.saying("Noted.", "Noted.")
    first = client.respond(input=[USER], store=False)
    lost = {"type": "function_call_output", "call_id": "call_none", "output": "x"}
    assert client.refused(input=[lost], previous_response_id=first["id"])["status"] == 400
    error = client.refused(input="And?", previous_response_id=first["id"])["error"]
    assert error["code"] == "previous_response_not_found"
    client.respond(input=[USER], store=False)


def test_a_prepared_response_says_nothing_and_is_continued(server: SocketServer, client: Client) -> None:
    server.saying("x", "Alice.")
    client.create(input=[USER], instructions="Be brief.", tools=[ADD], store=False, generate=False)
    events = checked(client.events())
    check_stream(events)
    prepared = events[-1]["response"]
    assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
    assert server.engine.requests[-1].sampling.max_tokens == 1
    first = server.engine.requests[-1].prompt_token_ids
    client.respond(
        input="Who?", instructions="Be brief.", tools=[ADD], store=False, previous_response_id=prepared["id"]
    )
    second = server.engine.requests[-1].prompt_token_ids
    ending = len(server.tokenizer.encode("assistant")) + 1
    assert second[: len(first) - ending] == first[:-ending]


def test_lanes_are_served_beside_each_other_and_each_in_its_order(server: SocketServer, client: Client) -> None:
    """The first response hangs until the test ends it; those of its lane wait, and others do not."""
    t = server.tokenizer
    server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
    client.create(input="one", stream_id="a", store=False)
    hanging = client.until("response.in_progress")
    assert {event["stream_id"] for event in hanging} == {"a"}
    asked = len(server.engine.requests)
    server.saying("Two.", "Three.")
    client.create(input="three", stream_id="a", store=False)
    client.create(input="two", stream_id="b", store=False)
    events = checked(client.events())
    assert {event["stream_id"] for event in events} == {"b"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Two."
    assert len(server.engine.requests) == asked + 1
    rest = [*t.encode("final"), t.message, *t.encode("One."), t.return_]
    request = server.engine.requests[asked - 1].request_id
    stream = server.engine.streams[request]
    server.on_loop(lambda: stream.put(GenerationOutput(request, rest, finish_reason="stop")))
    one, three = client.events(), client.events()
    assert {event["stream_id"] for event in (*one, *three)} == {"a"}
    assert one[-1]["response"]["output"][0]["content"][0]["text"] == "One."
    assert three[-1]["response"]["output"][0]["content"][0]["text"] == "Three."
    forked = one[-1]["response"]["id"]
    server.saying("Fork.")
    client.create(input="fork", stream_id="c", store=False, previous_response_id=forked)
    assert client.events()[-1]["type"] == "response.completed"
    assert "One." in server.prompt()


def test_without_a_lane_responses_follow_each_other(server: SocketServer, client: Client) -> None:
    server.saying("One.", "Two.", "Three.")
    for _ in range(3):
        client.create(input="hi", store=False)
    for text in ("One.", "Two.", "Three."):
        events = client.events()
        assert "stream_id" not in events[-1]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


def test_a_client_that_leaves_ends_its_responses(server: SocketServer) -> None:
    t = server.tokenizer
    server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
    with server.connect() as client:
        client.create(input="one", store=False)
        client.create(input="two", stream_id="b", store=False)
        client.until("response.in_progress")
        client.until("response.in_progress")
        running = [request.request_id for request in server.engine.requests[-2:]]
    wait_until(lambda: {*running} <= {*server.engine.cancelled}, "both are cancelled")
    wait_until(lambda: server.model.admission.sequences == 0, "no place is held")


def test_a_draining_server_says_so(model_folder: Path) -> None:
    with SocketServer(model_folder) as server, server.connect() as client:
        server.on_loop(lambda: setattr(server.model, "draining", True))
        error = client.refused(input="hi")
        assert (error["status"], error["error"]["code"]) == (503, "draining")
        assert int(error["error"]["headers"]["retry-after"]) >= 1
        checked([error])


@pytest.mark.parametrize(
    ("event", "status", "code", "param"),
    [
        ({"type": "response.create", "input": "hi", "model": "none"}, 404, "model_not_found", "model"),
        ({"type": "response.create", "input": [{"type": "hologram"}]}, 400, None, "input[0].type"),
        ({"type": "response.create", "input": "hi", "background": True}, 400, "unsupported_parameter", "background"),
        ({"type": "response.create", "input": "hi", "stream": False}, 400, "unsupported_parameter", "stream"),
        ({"type": "response.create", "input": "x" * 3000}, 400, "context_length_exceeded", "input"),
        ({"type": "response.create"}, 400, None, "input"),
        ({"type": "response.create", "input": "hi", "stream_id": 7}, 400, None, "stream_id"),
        ({"type": "response.cancel"}, 400, None, "type"),
        ({"type": "response.steer", "input": "hi"}, 400, None, "previous_response_id"),
        ({}, 400, None, "type"),
    ],
)
def test_what_cannot_be_is_an_error_and_the_connection_goes_on(
    server: SocketServer, client: Client, event: Json, status: int, code: str | None, param: str
) -> None:
    client.send(**event)
    error = client.event()
    checked([error])
    assert (error["status"], error["error"]["code"], error["error"]["param"]) == (status, code, param)
    server.saying("ok")
    client.respond(input="hi")


@pytest.mark.parametrize("text", ["", "[]", "7", '{"type": ', "[" * 100_000, '{"a":' * 100_000])
def test_what_is_no_object_is_an_error(server: SocketServer, client: Client, text: str) -> None:
    client.connection.send(text)
    error = checked([client.event()])[0]
    assert error["status"] == 400
    server.saying("ok")
    client.respond(input="hi")


def test_steering_ends_a_response_after_its_item_and_goes_on(server: SocketServer, client: Client) -> None:
    t = server.tokenizer
    thought = [t.channel, *t.encode("analysis"), t.message, *t.encode("Let me think.")]
    server.engine.script = lambda request: [GenerationOutput(request.request_id, thought)]
    client.create(input=[USER], store=False, stream_id="a", instructions="Be brief.")
    begun = client.until("response.reasoning_text.delta")
    response_id, request = begun[0]["response"]["id"], server.engine.requests[-1].request_id
    client.send(type="response.steer", previous_response_id=response_id, input="In French, please.")
    accepted = client.until("response.steer.accepted")[-1]
    checked([accepted])
    assert (accepted["steer"]["previous_response_id"], accepted["stream_id"]) == (response_id, "a")
    server.saying("Bonjour.")
    more = [t.end, t.start, *t.encode("assistant"), t.channel, *t.encode("final"), t.message, *t.encode("Hello.")]
    stream = server.engine.streams[request]
    server.on_loop(lambda: stream.put(GenerationOutput(request, more)))
    ended = client.events()[-1]
    assert (ended["type"], ended["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "steered"})
    assert [item["type"] for item in ended["response"]["output"]] == ["reasoning"]
    events = client.events()
    check_stream([{name: of for name, of in event.items() if name != "stream_id"} for event in events])
    assert events[-1]["response"]["previous_response_id"] == response_id
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == "Bonjour."
    assert events[-1]["stream_id"] == "a"
    prompt = server.prompt()
    assert prompt.index("Be brief.") < prompt.index("Alice") < prompt.index("In French, please.")
    client.send(type="response.steer", previous_response_id=response_id, input="Late.")
    failed = checked([client.event()])[0]
    assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", "response_already_completed")
    assert failed["steer"] == {"input": "Late.", "previous_response_id": response_id}


def steer_before_a_call(server: SocketServer, client: Client, text: str) -> tuple[str, list[Json]]:
    """The id of a response that waits for the result of a call, and the events after it. The last one says that the
    input waits."""
    t = server.tokenizer
    begun = [t.channel, *t.encode("commentary to=functions.add "), t.constrain, *t.encode("json"), t.message]
    begun += t.encode('{"a"')
    server.engine.script = lambda request: [GenerationOutput(request.request_id, begun)]
    client.create(input="1 + 1?", tools=[ADD], store=False)
    first = client.until("response.output_item.added")[0]["response"]["id"]
    client.send(type="response.steer", previous_response_id=first, input=[{"role": "user", "content": text}])
    client.until("response.steer.accepted")
    request = server.engine.requests[-1].request_id
    rest = [*t.encode(": 1}"), t.call]
    server.on_loop(lambda: server.engine.streams[request].put(GenerationOutput(request, rest, finish_reason="stop")))
    call = client.events()[-1]["response"]["output"][-1]
    events = checked(client.until("response.steer.pending"))
    (stub,) = events[-1]["required_input"]
    assert stub == {"type": "function_call_output", "call_id": call["call_id"], "name": "add"}
    return first, events


def test_steering_waits_for_the_result_of_a_call(server: SocketServer, client: Client) -> None:
    first, (pending,) = steer_before_a_call(server, client, "In words.")
    assert (pending["type"], pending["reason"]) == ("response.steer.pending", "waiting_for_required_input")
    (stub,) = pending["required_input"]
    error = client.refused(input=7, tools=[ADD], store=False, previous_response_id=first)
    assert (error["status"], error["error"]["param"]) == (400, "input")
    server.saying("Two.")
    client.respond(input=[{**stub, "output": "2"}], tools=[ADD], store=False, previous_response_id=first)
    prompt = server.prompt()
    assert prompt.index("1 + 1?") < prompt.index("In words.")
    assert "<|message|>2<|end|>" in prompt


def test_input_that_waits_is_counted_in_bytes(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    held = server.service.bodies
    wait_until(lambda: held._bytes == 0, "other requests are over")
    with server.connect() as client:
        first, (pending,) = steer_before_a_call(server, client, "x" * 100_000)
        wait_until(lambda: 100_000 <= held._bytes < 101_000, "the input that waits is held, and no request")
        monkeypatch.setattr(memory, "MAX_BODIES_BYTES", 150_000)
        error = client.refused(input=[{**pending["required_input"][0], "output": "y" * 60_000}])
        assert error["status"] == 503
        server.engine.script = lambda request: [GenerationOutput(request.request_id, [server.tokenizer.channel])]
        client.create(input="hi", store=False)
        running = client.until("response.in_progress")[0]["response"]["id"]
        client.send(type="response.steer", previous_response_id=running, input="z" * 60_000)
        assert client.event()["type"] == "error", "the frame itself has no room"
        monkeypatch.setattr(memory, "MAX_BODIES_BYTES", 1 << 30)
        client.send(type="response.steer", previous_response_id=running, input="z" * 10_000)
        client.until("response.steer.accepted")
        assert held._bytes > 110_000
    wait_until(lambda: held._bytes == 0, "all is given back with the connection")
    with server.connect() as client:
        first, (pending,) = steer_before_a_call(server, client, "x" * 1000)
        server.saying("Two.")
        output = [{**pending["required_input"][0], "output": "2"}]
        client.respond(input=output, tools=[ADD], store=False, previous_response_id=first)
        wait_until(lambda: held._bytes == 0, "all is given back once it was used")


def test_input_is_counted_until_the_next_request_has_a_copy(
    server: SocketServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, counted, t = server.service.bodies, list[int](), server.tokenizer
    wait_until(lambda: held._bytes == 0, "other requests are over")
    whole = limits.changed

    def changed(text: str, **fields: Any) -> str:
        counted.append(held._bytes)
        return whole(text, **fields)

    monkeypatch.setattr(limits, "changed", changed)
    thought = [t.channel, *t.encode("analysis"), t.message, *t.encode("Let me think.")]
    server.engine.script = lambda request: [GenerationOutput(request.request_id, thought)]
    client.create(input="hi", store=False)
    running = client.until("response.reasoning_text.delta")[0]["response"]["id"]
    request = server.engine.requests[-1].request_id
    client.send(type="response.steer", previous_response_id=running, input="x" * 100_000)
    client.until("response.steer.accepted")
    server.saying("ok")
    server.on_loop(lambda: server.engine.streams[request].put(GenerationOutput(request, [t.end])))
    client.events()
    client.events()
    assert len(counted) == 1
    assert counted[0] > 100_000
    wait_until(lambda: held._bytes == 0, "all is given back")


def test_the_oldest_input_that_waits_comes_back(
    server: SocketServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING", 1)
    assert len(steer_before_a_call(server, client, "First.")[1]) == 1
    failed, _ = steer_before_a_call(server, client, "Second.")[1]
    assert failed["type"] == "response.steer.failed"
    assert failed["error"]["code"] == "too_many_pending_steers"
    assert failed["steer"]["input"] == [{"role": "user", "content": "First.", "type": "message"}]


def test_what_cannot_be_steered_comes_back(server: SocketServer, client: Client) -> None:
    client.send(type="response.steer", previous_response_id="resp_none", input="x")
    failed = checked([client.event()])[0]
    assert (failed["error"]["code"], failed["steer"]["input"]) == ("response_not_found", "x")
    t = server.tokenizer
    server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
    client.create(input="hi", store=False, context_management=[{"type": "compaction"}])
    running = client.until("response.in_progress")[0]["response"]["id"]
    client.send(type="response.steer", previous_response_id=running, input="x")
    assert client.event()["error"]["code"] == "steering_not_supported"
    client.create(input="hi", store=False, stream_id="b")
    running = client.until("response.in_progress")[0]["response"]["id"]
    client.send(type="response.steer", previous_response_id=running, input=[])
    assert client.event()["error"]["code"] == "invalid_input"
    for _ in range(limits.MAX_STEERS):
        client.send(type="response.steer", previous_response_id=running, input="x")
        assert client.event()["type"] == "response.steer.accepted"
    client.send(type="response.steer", previous_response_id=running, input="x")
    assert client.event()["error"]["code"] == "too_many_pending_steers"


def test_there_is_a_limit_of_what_waits(server: SocketServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING", 2)
    monkeypatch.setattr(limits, "MAX_LANES", 2)
    t = server.tokenizer
    server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
    for lane in ("a", "b"):
        client.create(input="hi", stream_id=lane, store=False)
        client.until("response.in_progress")
    client.create(input="hi", stream_id="c", store=False)
    error = client.event()
    assert (error["status"], error["stream_id"], error["error"]["code"]) == (429, "c", "rate_limit_exceeded")
    for _ in range(3):
        client.create(input="hi", stream_id="a", store=False)
    assert client.event()["status"] == 429


def test_a_connection_ends_after_its_time(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIFETIME_S", 0.0)
    with server.connect() as client:
        error = checked([client.event()])[0]
        assert (error["status"], error["error"]["code"]) == (400, "websocket_connection_limit_reached")
        with pytest.raises(ConnectionClosed) as closed:
            client.event()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


def test_what_runs_when_the_time_is_over_ends_first(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SocketServer(model_folder) as server, server.connect() as client:
        t = server.tokenizer
        server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
        client.create(input="hi", store=False)
        client.until("response.in_progress")
        connection = server.on_loop(lambda: _only_connection(server))
        server.on_loop(lambda: setattr(connection, "_over", True))
        client.create(input="more", stream_id="b")
        assert client.event()["error"]["code"] == "websocket_connection_limit_reached"
        request = server.engine.requests[-1].request_id
        rest = [*t.encode("final"), t.message, *t.encode("Done."), t.return_]
        put = server.engine.streams[request].put
        server.on_loop(lambda: put(GenerationOutput(request, rest, finish_reason="stop")))
        assert client.events()[-1]["type"] == "response.completed"
        assert client.event()["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            client.event()


def _only_connection(server: SocketServer) -> Any:
    (found,) = (of for of in gc.get_objects() if type(of) is limits._Connection and of._service is server.service)
    return found


def test_keys_and_limits_are_those_of_requests(model_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: secret, requests_per_minute: 1}\n- {name: b, key: other}\n")
    with SocketServer(model_folder, api_keys_file=str(keys)) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                server.connect(headers)
            assert refused.value.response.status_code == 401
            assert b"invalid_api_key" in refused.value.response.body
        server.saying(*["ok"] * 3)
        with server.connect({"Authorization": "Bearer secret"}) as client:
            made = client.respond(input="hi", store=False)
            error = checked([client.refused(input="hi")])[0]
            assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
            assert error["error"]["headers"]["x-ratelimit-limit-requests"] == "1"
            with server.connect({"X-Api-Key": "other"}) as other:
                assert other.refused(input="x", previous_response_id=made["id"])["status"] == 400
                other.respond(input="hi")


def test_pages_of_other_origins_open_no_connection(server: SocketServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        server.connect({"Origin": "http://evil.example"})
    assert refused.value.response.status_code == 403
    with server.connect({"Origin": server.url}) as client:
        server.saying("ok")
        client.respond(input="hi")
    own = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    with own, pytest.raises(InvalidStatus) as refused:
        connect("ws://evil.example/v1/responses", sock=own)
    assert refused.value.response.status_code == 403
    assert b"host_not_allowed" in refused.value.response.body


def test_openais_client_speaks_to_it(server: SocketServer) -> None:
    server.saying("Hello.", "Alice.")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.responses.connect(websocket_connection_options={"proxy": None}) as connection,
    ):
        connection.response.create(model="fake", input="My name is Alice.", store=False)
        first = _final(connection)
        connection.response.create(model="fake", input="Who?", store=False, previous_response_id=first.id)
        assert _final(connection).output_text == "Alice."
    assert "My name is Alice." in server.prompt()


def _final(connection: Any) -> Any:
    for event in connection:
        assert event.type != "error", event
        if event.type == "response.completed":
            return event.response
    raise AssertionError


def test_a_connection_takes_another_after_an_answer(fake_server: ServerProcess) -> None:
    """The real engine process: text comes, and the server is idle afterwards."""
    with connect(f"ws{fake_server.url.removeprefix('http')}/v1/responses", proxy=None) as connection:
        client = Client(connection)
        for _ in range(3):
            client.send(type="response.create", input="hi", max_output_tokens=20)
            assert client.events()[-1]["type"] in ("response.completed", "response.incomplete")
    fake_server.wait_idle()


def test_a_plain_request_is_told_to_upgrade(server: SocketServer) -> None:
    answer = httpx.get(f"{server.url}/v1/responses")
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert answer.json()["error"]["code"] == "upgrade_required"
