"""Tools whose calls are items of a type of their own, and which the client runs.

The model knows each of them as a function. Their items are those of OpenAI's hosted tools, so hosted.py reads them in a
conversation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from oscine.api.serving.schemas import arguments_object, convert
from oscine.chat.messages import FunctionTool

Object = dict[str, Any]  # of JSON

_TEXT: Object = {"type": "string"}
_TEXTS: Object = {"type": "array", "items": _TEXT}
_MILLISECONDS: Object = {"type": "integer", "description": "Milliseconds after which it is ended."}


def _object(required: Object, **optional: Any) -> Object:
    properties = required | optional
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class TypedTool:
    """A tool that a request names by its type. The type is also the name of the model's function."""

    type: str
    call: str  # type of its items
    argument: str  # the field of an item that has the arguments
    empty: Object  # what this field is until the arguments are complete, beside the defaults
    defaults: Object = field(default_factory=dict)  # of this field
    description: str = ""
    parameters: Object | None = None  # JSON schema
    more: Object = field(default_factory=dict)  # further fields of an item

    def function(self, tool: Object, where: str) -> FunctionTool:
        """Raises APIError that names what is wrong with the request's tool."""
        given = convert(tool, _Given, where)
        own = self.parameters is not None
        about = self.description if own else given.description or self.description
        return FunctionTool(self.type, about, self.parameters or given.parameters, strict=own)

    def arguments(self, written: str) -> Object:
        """The field of an item, for what the model wrote. Of arguments that were cut, and must satisfy a schema,
        nothing is kept."""
        made = arguments_object(written)
        is_lost = not written or (self.parameters is not None and "invalid_json" in made)
        given = self.empty if is_lost else made
        return given | {name: value for name, value in self.defaults.items() if name not in given}


class _Given(Struct):
    description: str | None = None
    parameters: Object | None = None


_PATCH = {
    "path": _TEXT,
    "diff": {"type": "string", "description": "Lines that begin with ' ', '-' or '+', after '@@'."},
}
_TYPED = (
    TypedTool(
        "shell",
        "shell_call",
        "action",
        {"commands": []},
        {"timeout_ms": None, "max_output_length": None},
        "Runs commands in a shell, each by itself, and returns their output.",
        _object(
            {"commands": _TEXTS},
            timeout_ms=_MILLISECONDS,
            max_output_length={"type": "integer", "description": "Characters of output per command."},
        ),
        {"environment": {"type": "local"}},
    ),
    TypedTool(
        "local_shell",
        "local_shell_call",
        "action",
        {"command": []},
        {"type": "exec", "env": {}},
        "Runs a command and returns its output.",
        _object(
            {"command": _TEXTS},
            env={"type": "object", "additionalProperties": _TEXT, "description": "Environment variables."},
            timeout_ms=_MILLISECONDS,
            working_directory=_TEXT,
        ),
    ),
    TypedTool(
        "apply_patch",
        "apply_patch_call",
        "operation",
        {"type": "update_file", "path": "", "diff": ""},
        {},
        "Creates, changes or deletes a file.",
        {
            "anyOf": [
                _object({"type": {"enum": ["create_file", "update_file"]}, **_PATCH}),
                _object({"type": {"const": "delete_file"}, "path": _TEXT}),
            ]
        },
    ),
    TypedTool(
        "tool_search",
        "tool_search_call",
        "arguments",
        {},
        {},
        "Finds further tools. They can be called once they are found.",
        more={"execution": "client"},
    ),
)
_BY_TYPE = {tool.type: tool for tool in _TYPED}


def typed_tool(tool: Mapping[str, Any]) -> TypedTool | None:
    """The tool of a request, if it is one of these and the client runs it; a vendor's servers run the others."""
    kind = _BY_TYPE.get(str(tool.get("type")))
    if kind is None or (kind.type == "tool_search" and tool.get("execution") != "client"):
        return None
    place = tool.get("environment") if kind.type == "shell" else None
    return kind if place is None or (isinstance(place, dict) and place.get("type") == "local") else None
