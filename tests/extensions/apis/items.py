"""Items of the Responses and Conversations APIs, for tests."""

import re
from typing import Any

from tests.api.scripted_server import ScriptedServer

Json = dict[str, Any]


def said(content: str = "hi", **fields: Any) -> Json:
    return {"type": "message", "role": "user", "content": content, **fields}


def new(server: ScriptedServer, *items: Json) -> str:
    made = server.post("/v1/conversations", {"items": [*items]})
    assert made.status_code == 200, made.text
    return f"/v1/conversations/{made.json()['id']}"


def is_refused(answer: Any, param: str, why: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(why, error["message"]), error
    assert "\n" not in error["message"]
