"""Reads a stream of the Responses API as strictly as possible: types, numbers, nesting, sums of deltas.

Written from the types of the `openai` package, independent of the code that makes the events.
"""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent

from tests.conformance.exact_types import check_type

Event = dict[str, Any]

_TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
_STARTS = {"response.created", "response.queued", "response.in_progress"}
# Events that add to a field of an item: the field, and the event that tells the sum.
_SUMS = {
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
    "response.mcp_call_arguments": "arguments",
}


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    """Fails unless the response is one to the letter."""
    check_type(Response, json.dumps(response))
    return response


def parse(text: str) -> list[Event]:
    """The events of a body: each has a name that is its type, and nothing comes between or after them."""
    *frames, end = text.split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_stream(events: list[Event], first: int = 0) -> dict[str, Any] | None:
    """Fails unless the events make a whole stream; returns the response at its end (None after a bare error)."""
    for event in events:
        check_type(ResponseStreamEvent, json.dumps(event))
    assert [event["sequence_number"] for event in events] == [*range(first, first + len(events))]
    assert [event["type"] in _TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    if events[-1]["type"] == "error":
        return None
    stream = _Stream()
    for event in events:
        stream.read(event)
    return stream.response


class _Stream:
    """The state of a stream: which item is open, and what it must turn out to be."""

    def __init__(self) -> None:
        self.response: dict[str, Any] = {}
        self.items: list[dict[str, Any]] = []
        self.open: str | None = None  # id of the item that is open
        self.part: dict[str, Any] | None = None  # that is open
        self.sums: dict[str, str] = {}
        self.told: set[str] = set()  # sums that a done event has sent
        self.logprobs: list[Any] = []
        self.annotations: list[Any] = []
        self.part_text: str | None = None  # told by a text's done event
        self.summary: list[dict[str, Any]] = []  # parts that the events of the open item sent
        self.summary_open = False
        self.commands: list[str] = []  # of the open item

    def read(self, event: Event) -> None:
        kind = event["type"]
        if "response" in event:
            self._lifecycle(kind, event["response"])
            return
        assert self.response, "created comes first"
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert self.open is None, "items do not overlap"
            assert index == len(self.items)
            self.open, self.sums, self.told = event["item"]["id"], {}, set()
            self.summary, self.commands = [], []
            assert event["item"].get("status", "in_progress") == "in_progress"
            self.items.append(event["item"])
            return
        assert index == len(self.items) - 1
        if kind == "response.output_item.done":
            self._item_done(event["item"])
            return
        if "command_index" in event:
            self._of_command(kind, event)
            return
        assert event["item_id"] == self.open
        if "content_index" in event:
            self._of_part(kind, event)
        elif "summary_index" in event:
            self._of_summary(kind, event)
        elif kind.endswith(".delta"):
            assert event["delta"]
            name = kind.removesuffix(".delta")
            self.sums[name] = self.sums.get(name, "") + event["delta"]
        elif kind.removesuffix(".done") in _SUMS:
            name = kind.removesuffix(".done")
            assert event[_SUMS[name]] == self.sums.get(name, "")
            assert event.get("name", self.items[-1].get("name")) == self.items[-1].get("name")
            assert ("name" in event) is (name == "response.function_call_arguments")
            self.told.add(name)
            self.sums[name] = event[_SUMS[name]]

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> None:
        if not self.response:
            assert kind == "response.created"
        else:
            assert kind != "response.created"
            changing = ("status", "store", "output", "usage", "completed_at", "error", "incomplete_details")
            same = [{k: v for k, v in r.items() if k not in changing} for r in (self.response, response)]
            assert same[0] == same[1]
        self.response = response
        if kind in _STARTS:
            assert response["output"] == []
            assert not self.items
            return
        assert self.open is None, "everything is closed before the end"
        assert response["output"] == self.items
        assert response["usage"] is not None
        check_response(response)

    def _item_done(self, item: dict[str, Any]) -> None:
        assert item["id"] == self.open
        assert self.part is None
        assert item["type"] == self.items[-1]["type"]
        assert item.get("status") != "in_progress" or item["type"] == "apply_patch_call"  # that was cut
        for name, text in self.sums.items():
            assert item[_SUMS[name]] == text
            assert name in self.told, "what grows is told as a whole before its item is done"
        if item["type"] in ("message", "reasoning"):
            assert len(item["content"]) == 1
        if item["type"] == "shell_call":
            assert item["action"]["commands"] == self.commands
        assert not self.summary_open
        assert item.get("summary", []) == self.summary
        self.items[-1] = item
        self.open = None

    def _of_command(self, kind: str, event: Event) -> None:
        if kind == "response.shell_call_command.added":
            self.commands.append(event["command"])
        assert event["command_index"] == len(self.commands) - 1
        if kind == "response.shell_call_command.delta":
            self.commands[-1] += event["delta"]
        elif kind == "response.shell_call_command.done":
            assert event["command"] == self.commands[-1]

    def _of_summary(self, kind: str, event: Event) -> None:
        if kind == "response.reasoning_summary_part.added":
            assert not self.summary_open
            assert event["part"] == {"type": "summary_text", "text": ""}
            self.summary.append(dict(event["part"]))
            self.summary_open = True
        assert self.summary_open
        assert event["summary_index"] == len(self.summary) - 1
        part = self.summary[-1]
        if kind == "response.reasoning_summary_text.delta":
            assert event["delta"]
            part["text"] += event["delta"]
        elif kind == "response.reasoning_summary_text.done":
            assert event["text"] == part["text"]
        elif kind == "response.reasoning_summary_part.done":
            assert event["part"] == part
            self.summary_open = False

    def _of_part(self, kind: str, event: Event) -> None:
        assert event["content_index"] == 0
        if kind == "response.content_part.added":
            assert self.part is None
            assert event["part"]["text"] == ""
            self.part, self.part_text = {**event["part"]}, None
            self.logprobs, self.annotations = [], []
            return
        assert self.part is not None
        assert self.part_text is None or kind == "response.content_part.done"
        if kind.endswith("_text.delta"):
            assert event["delta"]
            self.part["text"] += event["delta"]
            self.logprobs += event.get("logprobs", [])
        elif kind.endswith("annotation.added"):
            assert event["annotation_index"] == len(self.annotations)
            self.annotations.append(event["annotation"])
        elif kind.endswith("_text.done"):
            assert event["text"] == self.part["text"]
            assert event.get("logprobs", []) == self.logprobs
            self.part_text = event["text"]
        else:
            assert kind == "response.content_part.done"
            assert self.part_text is not None
            part = event["part"]
            assert part["text"] == self.part_text
            assert part.get("logprobs", []) == self.logprobs
            assert part.get("annotations", []) == self.annotations
            self.part = None
