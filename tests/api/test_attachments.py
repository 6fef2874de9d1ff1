"""Pictures and files: in the result of a tool a text stands in their place; a user's own are refused."""

import base64
import sys
from typing import Any

import pytest

from oscine.api.turns.attachments import result_text
from tests.api.scripted_server import ScriptedServer

USER = {"role": "user", "content": "hi"}
PNG = base64.b64encode(b"\x89PNG" + bytes(66)).decode()
PDF = base64.b64encode(b"%PDF-1.7\n" * 3).decode()
NOTES = base64.b64encode("caf\u00e9".encode()).decode()
NOT_SHOWN = "not shown, as this model reads text only]"
A_PNG = f"[image: image/png, 70 bytes; {NOT_SHOWN}"


def anthropic(content: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    use = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, **more}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"messages": turns, "max_tokens": 9}


def openai(content: Any) -> tuple[str, dict[str, Any]]:
    call = {"id": "t", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "t", "content": content}]
    return "/v1/chat/completions", {"messages": [USER, *turns]}


def responses(content: Any) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "t", "name": "see", "arguments": "{}"}
    return "/v1/responses", {"input": [USER, call, {"type": "function_call_output", "call_id": "t", "output": content}]}


def source(kind: str, **fields: str) -> dict[str, Any]:
    return {"type": kind, **fields}


def result_seen(server: ScriptedServer, path: str, body: dict[str, Any]) -> str:
    """What the model reads as the result of the function `see`."""
    answer = server.post(path, {"model": server.service.names[0], **body})
    assert answer.status_code == 200, answer.text
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    return prompt.rpartition("functions.see to=assistant<|channel|>commentary<|message|>")[2].partition("<|end|>")[0]


@pytest.mark.needs("apis")
@pytest.mark.parametrize(
    ("block", "seen"),
    [
        ({"type": "image", "source": source("base64", media_type="image/png", data=PNG)}, A_PNG),
        (
            {"type": "image", "source": source("url", url="https://x.org/a.png")},
            f"[image: image/png, https://x.org/a.png; {NOT_SHOWN}",
        ),
        ({"type": "image", "source": source("file", file_id="file_7")}, f"[image: file_7; {NOT_SHOWN}"),
        (
            {"type": "document", "title": "a.pdf", "source": source("base64", media_type="application/pdf", data=PDF)},
            f"[document: application/pdf, 27 bytes, a.pdf; {NOT_SHOWN}",
        ),
        ({"type": "document", "source": source("text", media_type="text/plain", data="Read me.")}, "Read me."),
        (
            {"type": "document", "title": "n.txt", "source": source("base64", media_type="text/plain", data=NOTES)},
            "n.txt\ncaf\u00e9",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Part."}]}},
            "Part.",
        ),
        (
            {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "Found."}]},
            "T\nu\nFound.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": PNG}]}},
            f"[image: of an unknown kind; {NOT_SHOWN}\n",
        ),
        ({"type": "tool_reference", "tool_name": "WebFetch"}, "[tool: WebFetch]"),
        ({"type": "hologram"}, f"[hologram: of an unknown kind; {NOT_SHOWN}"),
        ({"type": "document", "source": 5}, f"[document: of an unknown kind; {NOT_SHOWN}"),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_what_a_tool_shows_to_anthropics_clients(scripted: ScriptedServer, block: Any, seen: str) -> None:
    assert result_seen(scripted, *anthropic([{"type": "text", "text": "See: "}, block])) == f"See: {seen}\n"
    assert result_seen(scripted, *anthropic([block], is_error=True)) == f"Error: {seen}\n"


@pytest.mark.needs("apis")
@pytest.mark.parametrize(
    ("make", "part", "seen"),
    [
        (openai, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, A_PNG),
        (openai, {"type": "file", "file": {"filename": "n.txt", "file_data": NOTES}}, "n.txt\ncaf\u00e9"),
        (
            openai,
            {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
            f"[audio: wav, 70 bytes; {NOT_SHOWN}",
        ),
        (responses, {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"}, A_PNG),
        (responses, {"type": "input_image", "file_id": "file-1"}, f"[image: file-1; {NOT_SHOWN}"),
        (
            responses,
            {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
            f"[file: application/pdf, 27 bytes, a.pdf; {NOT_SHOWN}",
        ),
        (responses, {"type": "input_file", "file_data": f"data:text/plain;base64,{NOTES}"}, "caf\u00e9"),
        (responses, {"type": "input_file", "file_data": "data:text/plain,a%20b"}, "a b"),
        (responses, {"type": "input_file", "file_data": "data:text/plain,100% of a%20b"}, "100% of a%20b"),
        (responses, {"type": "input_file", "file_data": "data:text/plain,%C3%A9=%3D%0a=41_ %25"}, "\u00e9==\n=41_ %"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_what_a_tool_shows_to_openais_clients(scripted: ScriptedServer, make: Any, part: Any, seen: str) -> None:
    assert result_seen(scripted, *make([{**part, "text": None} if make is openai else part])) == f"{seen}\n"


@pytest.mark.needs("apis")
def test_what_a_tool_shows_to_ollamas_clients(scripted: ScriptedServer) -> None:
    calls = [{"function": {"name": "see", "arguments": {}}}]
    turns = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "See: ", "images": [PNG]}]
    seen = result_seen(scripted, "/api/chat", {"messages": turns})
    assert seen == f"See: [image: 70 bytes; {NOT_SHOWN}\n"


@pytest.mark.needs("apis")
def test_what_was_shown_stays_in_a_conversation(scripted: ScriptedServer) -> None:
    path, body = responses([{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}])
    t = scripted.tokenizer
    scripted.says(t.channel, "final", t.message, "A picture.", t.return_)
    first = scripted.post(path, body).json()
    assert scripted.post(path, {"input": "And?", "previous_response_id": first["id"]}).status_code == 200
    assert A_PNG in t.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert PNG in scripted.get(f"/v1/responses/{first['id']}/input_items").text
    model = {"model": scripted.service.names[0]}
    assert scripted.post(f"{path}/input_tokens", model | body).status_code == 200
    assert scripted.post(f"{path}/compact", model | body).status_code == 200


@pytest.mark.needs("apis")
def test_what_stands_beside_results_is_from_tools(scripted: ScriptedServer) -> None:
    """Claude Code sends a PDF that a tool has read in this way."""
    path, body = anthropic("Read.")
    pdf = {"type": "document", "source": source("base64", media_type="application/pdf", data=PDF)}
    body["messages"][-1]["content"].append(pdf)
    result_seen(scripted, path, body)
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert f"<|start|>user<|message|>[document: application/pdf, 27 bytes; {NOT_SHOWN}\n<|end|>" in prompt


@pytest.mark.needs("apis")
@pytest.mark.parametrize("make", [openai, responses])
def test_what_follows_results_is_from_tools(scripted: ScriptedServer, make: Any) -> None:
    """Some clients send what a tool has shown as the user's next message."""
    path, body = make("Read.")
    url = f"data:image/png;base64,{PNG}"
    part = (
        {"type": "image_url", "image_url": {"url": url}}
        if make is openai
        else {"type": "input_image", "image_url": url}
    )
    field = "messages" if make is openai else "input"
    shown = {"role": "user", "content": [{"type": "text", "text": "See: "}, part]}
    body[field] += [shown, {"role": "assistant", "content": "A picture."}, USER]
    result_seen(scripted, path, body)
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert f"<|start|>user<|message|>See: {A_PNG}\n<|end|>" in prompt
    body[field].append(shown)  # this one is the user's own
    refused = scripted.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{field}[6].content[1].type")


@pytest.mark.needs("apis")
def test_a_users_file_of_text_is_read_by_openais_apis(scripted: ScriptedServer) -> None:
    data = {"filename": "a.txt", "file_data": f"data:text/plain;base64,{NOTES}"}
    for path, field, part in (
        ("/v1/chat/completions", "messages", {"type": "file", "file": data}),
        ("/v1/responses", "input", {"type": "input_file", **data}),
    ):
        answer = scripted.post(path, {field: [{"role": "user", "content": [part]}]})
        assert answer.status_code == 200, answer.text
        prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
        assert "<|start|>user<|message|>a.txt\ncaf\u00e9\n<|end|>" in prompt


@pytest.mark.parametrize(
    ("path", "message", "said"),
    [
        (
            "/v1/messages",
            {"content": [{"type": "image", "source": source("base64", media_type="image/png", data=PNG)}]},
            "Could not process image",
        ),
        (
            "/v1/messages",
            {"content": [{"type": "document", "source": source("base64", media_type="application/pdf", data=PDF)}]},
            "Could not process document",
        ),
        (
            "/v1/chat/completions",
            {"content": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]},
            "Could not process image. The image data you provided does not represent a valid image",
        ),
        (
            "/v1/responses",
            {"content": [{"type": "input_image", "image_url": "https://x.org/a.png"}]},
            "The image data you provided does not represent a valid image: the model reads text, not 'input_image'",
        ),
        ("/api/chat", {"content": "See.", "images": [PNG]}, "the model reads text only"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_a_users_own_picture_is_refused(scripted: ScriptedServer, path: str, message: Any, said: str) -> None:
    talk = [{"role": "user", **message}]
    field = "input" if path == "/v1/responses" else "messages"
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    response = scripted.post(path, {"model": scripted.service.names[0], field: talk, **limit})
    assert response.status_code == 400
    assert said in response.text
    assert not scripted.engine.requests


@pytest.mark.needs("apis")
def test_a_users_document_of_text_is_read(scripted: ScriptedServer) -> None:
    note = {"type": "document", "title": "n", "source": source("text", media_type="text/plain", data="Read me.")}
    body = {"model": scripted.service.names[0], "max_tokens": 9, "messages": [{"role": "user", "content": [note]}]}
    assert scripted.post("/v1/messages", body).status_code == 200
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert "<|start|>user<|message|>n\nRead me.\n<|end|>" in prompt


FOUND = [
    {
        "type": "web_search_result",
        "title": "Ponds",
        "url": "https://x.org",
        "encrypted_content": "Zz",
        "page_age": None,
    },
    {"type": "web_search_result", "title": "Lakes", "url": "https://y.org", "encrypted_content": "Zz"},
]
PAGE = {"type": "document", "title": "Ponds", "source": source("text", media_type="text/plain", data="Wet.")}


@pytest.mark.needs("apis")
@pytest.mark.parametrize(
    ("block", "seen"),
    [
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "caf\u00e9"}},
            '[server_tool_use: web_search {"query": "caf\u00e9"}]',
        ),
        ({"type": "mcp_tool_use", "id": "s", "name": "ask", "server_name": "m"}, "[mcp_tool_use: ask {}]"),
        (
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": FOUND},
            "[web_search_tool_result]\nPonds\nhttps://x.org\nLakes\nhttps://y.org",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
            },
            "[web_search_tool_result]\nmax_uses_exceeded",
        ),
        (
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_fetch_result", "url": "https://x.org", "content": PAGE},
            },
            "[web_fetch_tool_result]\nhttps://x.org\nPonds\nWet.",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "s",
                "content": {"type": "result", "stdout": "42", "stderr": "", "return_code": 0, "content": []},
            },
            "[bash_code_execution_tool_result]\n42",
        ),
        ({"type": "mcp_tool_result", "tool_use_id": "s", "content": "Yes."}, "[mcp_tool_result]\nYes."),
        ({"type": "mcp_tool_result", "tool_use_id": "s", "content": 5}, "[mcp_tool_result]"),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_what_a_vendors_own_tools_left_in_a_history_is_text(scripted: ScriptedServer, block: Any, seen: str) -> None:
    said = [{"type": "text", "text": "Let me see. "}, block, {"type": "text", "text": "So."}]
    body = {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": said}, USER]}
    answer = scripted.post("/v1/messages", {"model": scripted.service.names[0], **body})
    assert answer.status_code == 200, answer.text
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert f"<|channel|>final<|message|>Let me see. {seen}\nSo.<|end|>" in prompt


@pytest.mark.needs("apis")
def test_parts_within_parts_do_not_end(scripted: ScriptedServer) -> None:
    block: dict[str, Any] = {"type": "text", "text": "deep"}
    for _ in range(300):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    path, body = anthropic([block])
    assert scripted.post(path, {"model": scripted.service.names[0], **body}).status_code in (200, 400)


def test_a_long_address_with_escapes_is_decoded_outside_of_python() -> None:
    """Each escape took microseconds in which no other request went on."""
    calls: list[str] = []
    part = {"type": "input_file", "file_data": "data:text/plain," + "%3C" * 10_000}
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        text = result_text([part], "here")
    finally:
        sys.setprofile(None)
    assert (text, len(calls) < 1000) == ("<" * 10_000 + "\n", True)
