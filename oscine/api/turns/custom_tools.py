"""Custom tools: a client's tools that take plain text. Chat completions and responses have them.

The model writes an input that has a grammar as it is, and any other one as the field `input` of JSON.
"""

from typing import Any

import msgspec
from msgspec import Struct

from oscine.api.common.errors import invalid, unsupported
from oscine.chat.messages import FunctionTool, InputGrammar
from oscine.system.json_text import decode_json

_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class _Written(Struct):
    input: str


def text_tool(name: str, about: str | None) -> FunctionTool:
    """A tool that takes any text."""
    return FunctionTool(name, about or "", _INPUT)


def grammar_tool(
    name: str, about: str | None, syntax: str | None, definition: str | None, formats: tuple[str, str]
) -> FunctionTool:
    """A tool whose input has a grammar. `formats`: paths of the format and of its definition, for APIError."""
    if syntax not in ("lark", "regex"):
        raise unsupported(formats[0], "it is of type 'text', or 'grammar' with the syntax 'lark' or 'regex'")
    if not definition:
        raise invalid(formats[1], "a grammar needs it")
    form = InputGrammar("lark" if syntax == "lark" else "regex", definition)
    return FunctionTool(name, about or "", strict=True, input=form)


def written(text: str, *, raw: bool) -> str:
    """An earlier input as the model wrote it. `raw`: its tool has a grammar."""
    return text if raw else msgspec.json.encode({"input": text}).decode()


def read_input(arguments: str) -> str:
    """The text for a tool without a grammar: `input`, or all that the model wrote if it is no such JSON."""
    try:
        return decode_json(arguments, _Written).input
    except (ValueError, RecursionError):
        return arguments
