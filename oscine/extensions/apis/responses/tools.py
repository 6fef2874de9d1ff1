"""The tools of a request for a response: the client's own, and which calls are allowed.

All tools of a client become functions for the model: those of namespaces, custom ones, and those with items of a type
of their own. A tool may be found within the conversation: then it is declared there, not before it.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

from msgspec import Meta, Struct

from oscine.api.common.errors import invalid
from oscine.api.serving.formats import Calls
from oscine.api.serving.parameters import MAX_TOOLS
from oscine.api.serving.schemas import Function, convert
from oscine.api.turns.custom_tools import grammar_tool, text_tool
from oscine.chat.messages import FunctionTool
from oscine.chat.tools import ModelNames
from oscine.extensions.apis.responses.typed.tools import TypedTool, typed_tool
from oscine.extensions.apis.responses.view import Object

_LONGEST_NAME = 128  # characters of a function's name, and of a namespace's
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{_LONGEST_NAME}}}")
_NAMESPACES = {"code_interpreter": "python", "web_search": "browser", "file_search": "file_search"}
_BUILTIN_TYPES = (*_NAMESPACES, "mcp")  # clients append dates, and "preview"
_CLIENT_TYPES = ("function", "custom", "namespace")
_SECRETS = ("authorization", "headers")  # of an MCP server: not repeated in the response, and not stored


class _InputFormat(Struct):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class _Custom(Struct):
    name: str
    description: str | None = None
    format: _InputFormat | None = None


class _Namespace(Struct):
    name: str
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


class _Choice(Struct):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None
    mode: str = "auto"
    tools: Annotated[list["_Choice"], Meta(max_length=MAX_TOOLS)] = []


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A function as the model knows it, and as its client does."""

    function: FunctionTool
    name: str
    namespace: str | None = None
    custom: bool = False
    typed: TypedTool | None = None
    deferred: bool = False  # declared only where it is found

    @property
    def words(self) -> tuple[str, ...]:
        return words_of(self.name, self.namespace)


class ClientTools:
    """The tools that the client answers. Raises APIError that names the parameter."""

    def __init__(self, tools: Sequence[Object], later: Iterable[tuple[Object, str]] = ()) -> None:
        """`later`: tools in items of the conversation, with their paths; those in `tools` win."""
        own = [*islice(_once(tools), MAX_TOOLS + 1)]
        known = {tool.words for tool in own}
        found = {new.words: new for tool, where in later for new in _client_tools(tool, where)}  # listed again: once
        new = [tool for words, tool in found.items() if words not in known]
        if len(own) + len(new) > MAX_TOOLS:
            raise invalid("tools", f"there are more than {MAX_TOOLS} in all namespaces")
        self.names = ModelNames(tool.words for tool in own)
        self._tools: dict[str, ClientTool] = {}
        for tool in (*own, *new):
            name = self.names.seen(*tool.words)
            if name in self._tools:
                raise invalid("tools", f"function name {'.'.join(tool.words)!r} is used twice")
            self._tools[name] = replace(tool, function=replace(tool.function, name=name))
        self._by_client = {(tool.name, tool.namespace): tool for tool in self._tools.values()}
        searches = any(tool.typed is not None and tool.typed.type == "tool_search" for tool in own)
        hidden = {tool.words for tool in own if searches and tool.deferred}  # they can be found
        self.declared = tuple(tool.function for tool in self._tools.values() if tool.words in known - hidden)
        self._found = {words: tool for words, tool in found.items() if words in hidden or words not in known}

    @property
    def functions(self) -> tuple[FunctionTool, ...]:
        """All that may be called: those declared before the conversation, and those found in it."""
        return (*self.declared, *(self._by_client[tool.name, tool.namespace].function for tool in self._found.values()))

    def found(self, tools: Sequence[Object], where: str) -> list[FunctionTool]:
        """The functions of tools in an item, without those that are declared before the conversation."""
        new = (tool for i, given in enumerate(tools) for tool in _client_tools(given, f"{where}[{i}]"))
        return [self._by_client[tool.name, tool.namespace].function for tool in new if tool.words in self._found]

    def named(self, function: str) -> ClientTool:
        return self._tools[function]

    def function(self, name: str, namespace: str | None) -> FunctionTool | None:
        tool = self._by_client.get((name, namespace))
        return None if tool is None or tool.function not in self.functions else tool.function

    def takes_text(self, name: str, namespace: str | None) -> bool:
        """Whether the model writes the input of this custom tool as it is."""
        tool = self._by_client.get((name, namespace))
        return tool is not None and tool.function.input is not None


def words_of(name: str, namespace: str | None) -> tuple[str, ...]:
    """A client's tool as ModelNames has it."""
    return (name,) if namespace is None else (namespace, name)


def builtin_tools(tools: Sequence[Object]) -> list[Object]:
    """The tools that the server runs itself, each with its type without a date."""
    return [{**tool, "type": kind} for tool in tools if (kind := _builtin_type(tool)) is not None]


def _builtin_type(tool: Object) -> str | None:
    given = tool.get("type")
    return next((kind for kind in _BUILTIN_TYPES if isinstance(given, str) and given.startswith(kind)), None)


def repeated(tools: Sequence[Object], namespaces: Collection[str]) -> list[Object]:
    """The tools as a response repeats them. `namespaces`: of built-in tools.

    Tools that are of an unknown type or not enabled are left out, as they are from the prompt.
    """
    return [_repeated(tool) for tool in tools if _is_had(tool, namespaces)]


def left_out(tools: Sequence[Object], namespaces: Collection[str]) -> list[str]:
    """The types of the other tools."""
    return [str(tool.get("type")) for tool in tools if not _is_had(tool, namespaces)]


def _is_had(tool: Object, namespaces: Collection[str]) -> bool:
    return tool.get("type") in _CLIENT_TYPES or typed_tool(tool) is not None or _is_offered(tool, namespaces)


def _repeated(tool: Object) -> Object:
    """The tool without secrets; a function with the defaults of the fields that the client left out."""
    if tool.get("type") != "function":
        return {key: value for key, value in tool.items() if key not in _SECRETS}
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is True}


def _is_offered(tool: Object, namespaces: Collection[str]) -> bool:
    kind = _builtin_type(tool)
    return kind == "mcp" or (kind is not None and _NAMESPACES[kind] in namespaces)


def _client_tools(tool: Object, where: str) -> Iterable[ClientTool]:
    match tool.get("type"):
        case "function":
            f = convert(tool, Function, where)
            _check_name(f.name, where)
            function = FunctionTool(f.name, f.description or "", f.parameters, strict=bool(f.strict))
            yield ClientTool(function, f.name, deferred=tool.get("defer_loading") is True)
        case "custom":
            yield replace(
                _custom_tool(convert(tool, _Custom, where), where), deferred=tool.get("defer_loading") is True
            )
        case "namespace":
            space = convert(tool, _Namespace, where)
            _check_name(space.name, where)
            inner = (t for i, tool in enumerate(space.tools) for t in _client_tools(tool, f"{where}.tools[{i}]"))
            about = f"\n({space.name}: {space.description})" if space.description else ""
            for t in inner:
                text = (t.function.description + about).removeprefix("\n")
                yield replace(t, function=replace(t.function, description=text), namespace=space.name)
        case _ if (typed := typed_tool(tool)) is not None:
            yield ClientTool(typed.function(tool, where), typed.type, typed=typed)


def _once(tools: Sequence[Object]) -> Iterable[ClientTool]:
    """All client tools; one that is named by its type alone may be listed again."""
    seen: set[str] = set()
    for i, given in enumerate(tools):
        for tool in _client_tools(given, f"tools[{i}]"):
            if tool.typed is None or tool.typed.type not in seen:
                yield tool
            seen |= {tool.typed.type} if tool.typed else set()


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        given = name[: 2 * _LONGEST_NAME]
        rule = f"{given!r} is not 1 to {_LONGEST_NAME} letters, digits, underscores or hyphens"
        raise invalid(f"{where}.name", rule)


def _custom_tool(tool: _Custom, where: str) -> ClientTool:
    _check_name(tool.name, where)
    about, wanted = tool.description, tool.format
    if wanted is None or wanted.type == "text":
        return ClientTool(text_tool(tool.name, about), tool.name, custom=True)
    syntax, paths = (
        wanted.syntax if wanted.type == "grammar" else None,
        (f"{where}.format", f"{where}.format.definition"),
    )
    return ClientTool(grammar_tool(tool.name, about, syntax, wanted.definition, paths), tool.name, custom=True)


def allowed(choice: str | Object | None, tools: ClientTools, recipients: Sequence[str], *, parallel: bool) -> Calls:
    """What `tool_choice` allows. `recipients`: of built-in tools. Raises APIError."""
    everything = Calls(tools.functions, "auto", parallel, tuple(recipients))
    match choice:
        case None | "auto":
            return everything
        case "none":
            return Calls((), "none", parallel)
        case "required":
            return replace(everything, choice="required")
        case str():
            raise invalid("tool_choice", f"it is 'none', 'auto', 'required' or an object, not {choice!r}")
    wanted = convert(choice, _Choice, "tool_choice")
    if wanted.type == "allowed_tools":
        found = [_find(tool, everything, tools) for tool in wanted.tools]
        functions = tuple(f for some in found for f in some.tools)
        named = tuple(recipient for some in found for recipient in some.recipients)
        return Calls(functions, "required" if wanted.mode == "required" else "auto", parallel, named)
    return replace(_find(wanted, everything, tools), choice="required", parallel=False)


def _find(wanted: _Choice, everything: Calls, tools: ClientTools) -> Calls:
    """The one tool, or the tools of one server, that a choice names."""
    typed = typed_tool({"type": wanted.type, "execution": "client"})
    if wanted.type in _CLIENT_TYPES or typed is not None:
        called = (wanted.name or "") if typed is None else typed.type
        function = tools.function(called, wanted.namespace)
        if function is None:
            raise invalid("tool_choice", f"there is no tool {called!r} in 'tools', or it is still to be found")
        return replace(everything, tools=(function,), recipients=())
    kind = _builtin_type({"type": wanted.type})
    space, name = (wanted.server_label, wanted.name) if kind == "mcp" else (_NAMESPACES.get(kind or ""), None)
    split = ((recipient, *recipient.partition(".")) for recipient in everything.recipients)
    found = [recipient for recipient, of, _, tool in split if of == space and name in (None, tool)]
    if not found:
        raise invalid("tool_choice", f"no tool of type {wanted.type!r} is in 'tools' and enabled on this server")
    return replace(everything, tools=(), recipients=tuple(found))
