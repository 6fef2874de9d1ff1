"""Tools of the server in the page: switched on, called within an answer, and sent back with the next question.

A scripted engine behind the real API makes the responses.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.test_response_tools import Tools, answer, call, plays
from tests.web.playground import Playground

if TYPE_CHECKING:
    from playwright.sync_api import Route

ON_OFFER = [
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "web_search"},
    {"type": "mcp", "server_label": "notes"},
]


class Responses:
    """In front of a scripted server, whose event loop has a thread: this one runs the browser's."""

    def __init__(self, folder: Path) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._thread = ThreadPoolExecutor(1)
        self._server = self._thread.submit(self._start, folder).result()

    def _start(self, folder: Path) -> ScriptedServer:
        server = ScriptedServer(folder, served_model_names=("oscine-nano",)).__enter__()
        server.service.tools = Tools()  # type: ignore[assignment]
        calls = (
            call(server, "python", "2 + 2"),
            call(server, "browser.search", '{"query": "q"}'),
            call(server, "notes.find", '{"query": "bad"}', "commentary"),
            answer(server, "It is **4**."),
        )
        plays(server, *calls)
        return server

    def answer(self, route: "Route") -> None:
        body = route.request.post_data_json
        self.bodies.append(body)
        made = self._thread.submit(self._server.post, "/v1/responses", body).result()
        route.fulfill(status=made.status_code, body=made.text, content_type=made.headers["content-type"])

    def close(self) -> None:
        self._thread.submit(self._server.__exit__, None, None, None).result()
        self._thread.shutdown()


@pytest.fixture
def responses(model_folder: Path, playground: Playground) -> Iterator[Responses]:
    responses = Responses(model_folder)
    info = json.dumps({"tools": ON_OFFER})
    playground.page.route("**/server_info", lambda route: route.fulfill(body=info, content_type="application/json"))
    playground.page.route("**/v1/responses", responses.answer)
    playground.page.reload()
    yield responses
    responses.close()


def test_calls_of_the_servers_tools_and_what_they_gave(playground: Playground, responses: Responses) -> None:
    page = playground.page
    for tool in ("Python", "Browser", "notes"):
        page.get_by_role("checkbox", name=tool).check()
    playground.ask("What is 2 + 2?")
    playground.wait_answered()
    calls = playground.answer.locator(".server-call")
    expect(calls).to_have_count(3)
    expect(calls.nth(0)).to_contain_text("Runs Python")
    expect(calls.nth(0).locator("pre")).to_have_text(["2 + 2", "4"])
    expect(calls.nth(1)).to_contain_text("Searches for q")
    expect(calls.nth(1).locator("pre")).to_have_text("http://a.test/")
    expect(calls.nth(2)).to_contain_text("Calls notes.find failed")
    expect(calls.nth(2).locator("pre")).to_have_text(['{"query": "bad"}', "it broke"])
    expect(playground.answer.locator(".markdown")).to_have_text("It is 4.")
    expect(playground.answer.locator(".thought")).to_have_text("Hm.\n\nHm.\n\nHm.")
    assert "tokens/s" not in playground.figures(), "the time of the tools lies between the tokens"
    page.reload()
    expect(calls).to_have_count(3)

    playground.ask("And again?")
    playground.wait_answered()
    first, second = responses.bodies
    assert first == {
        "model": "oscine-nano",
        "input": [{"role": "user", "content": "What is 2 + 2?"}],
        "stream": True,
        "store": False,
        "include": ["code_interpreter_call.outputs", "web_search_call.action.sources"],
        "reasoning": {"effort": "medium"},
        "tools": ON_OFFER,
        "tool_choice": "auto",
    }
    kinds = [item.get("type", item.get("role")) for item in second["input"]]
    sent = ("code_interpreter_call", "web_search_call", "mcp_call", "message", "user")
    assert [kind for kind in kinds if kind in sent] == ["user", *sent]
    assert "client.responses.create(" in playground.request_as("Python")


def test_without_a_tool_it_is_a_chat_completion(playground: Playground, responses: Responses) -> None:
    box = playground.page.get_by_role("checkbox", name="Python")
    box.check()
    box.uncheck()
    playground.set(Temperature=0)
    playground.ask("What is 27 + 58?")
    playground.wait_answered()
    assert responses.bodies == []


def test_stop_texts_do_not_go_with_tools(playground: Playground, responses: Responses) -> None:
    playground.page.get_by_role("checkbox", name="Python").check()
    playground.page.get_by_label("Stop texts").fill("x")
    playground.ask("What is 2 + 2?")
    expect(playground.page.get_by_role("alert")).to_contain_text("Stop texts do not go with the server's tools.")
    assert responses.bodies == []
