"""Python functions as tools: described to the model by their signature and docstring, and run when it calls them."""

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from oscine.llm.errors import RequestError
from oscine.llm.forms import Schema, schema_of
from oscine.llm.results import ToolCall
from oscine.system.json_text import decode_json

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s+\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<what>.+)$", re.MULTILINE)
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Function:
    """One function. Raises RequestError for a signature that cannot be described."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self._arguments = self._struct()
        text = inspect.getdoc(function) or ""
        section = _SECTION.search(text)
        about, details = (text[: section.start()], text[section.end() :]) if section else (text, "")
        parameters = schema_of(self._arguments, "tools")
        self.tool = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": about.strip(),
                "parameters": _described(parameters, {m["name"]: m["what"] for m in _PARAMETER.finditer(details)}),
            },
        }

    def _struct(self) -> type[msgspec.Struct]:
        """The arguments as a record. One that is not given is UNSET, so that the function's own default counts."""
        try:
            hints = get_type_hints(self._function, include_extras=True)
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError, NameError) as error:
            raise self._refused(str(error)) from None
        fields: list[Any] = []
        for parameter in parameters:
            if parameter.kind not in _KINDS:
                raise self._refused(f"the model passes arguments by name, and {parameter} takes others")
            kind = hints.get(parameter.name, Any)
            if parameter.default is inspect.Parameter.empty:
                fields.append((parameter.name, kind))
            else:
                fields.append((parameter.name, kind | UnsetType, UNSET))
        return msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)

    def _refused(self, why: str) -> RequestError:
        return RequestError(f"Invalid value for 'tools': {self.name}: {why}.", "tools")

    async def call(self, arguments: str) -> str:
        """The result as a text for the model. Wrong arguments are told to the model; the function's errors are raised.

        A function that is not async runs in a thread of its own.
        """
        try:
            given = decode_json(arguments or "{}", self._arguments)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
            return f"Error: {error}"
        kwargs = {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is not UNSET}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**kwargs)
        else:
            result = await asyncio.to_thread(self._function, **kwargs)
        return result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _described(parameters: Schema, about: dict[str, str]) -> Schema:
    parameters.pop("title", None)
    for name, property in parameters.get("properties", {}).items():
        if name in about:
            property.setdefault("description", about[name].strip())
    return parameters


class Tools:
    """The tools of one request: functions that are run here, functions that the caller runs, built-in tools."""

    def __init__(self, given: Sequence[Any] | None, *, run: bool = True) -> None:
        """`given`: callables, and tools as the HTTP API has them. `run`: whether the callables are run.

        Raises RequestError for anything else.
        """
        if not isinstance(given, Sequence | None) or isinstance(given, str):
            raise RequestError(f"Invalid value for 'tools': a list is wanted, not {given!r:.100}.", "tools")
        for i, tool in enumerate(given or ()):
            if not callable(tool) and not (isinstance(tool, dict) and isinstance(tool.get("type"), str)):
                what = f"{tool!r:.100} is neither a function nor an object with a 'type'"
                raise RequestError(f"Invalid value for 'tools[{i}]': {what}.", f"tools[{i}]")
        found = [Function(tool) if callable(tool) else tool for tool in given or ()]
        self._functions = {tool.name: tool for tool in found if isinstance(tool, Function)} if run else {}
        plain = [tool.tool if isinstance(tool, Function) else tool for tool in found]
        self.client = [tool for tool in plain if tool.get("type") == "function"]
        self.builtin = [tool for tool in plain if tool.get("type") != "function"]

    def runs(self, calls: Sequence[ToolCall]) -> bool:
        """Whether all calls are of functions that are run here."""
        return bool(calls) and all(call.name in self._functions for call in calls)

    async def results(self, calls: Sequence[ToolCall]) -> list[str]:
        """Calls that are made at once run at once."""
        return await asyncio.gather(*(self._functions[call.name].call(call.arguments) for call in calls))
