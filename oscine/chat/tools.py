"""Tools of a client and of the server: their names are checked, and they are declared to the model.

Functions of the client have a namespace of their own. gpt-oss was trained with two of the server's namespaces, which
the system message declares. All others are declared in the developer message, beside the functions.
"""

import re
from collections.abc import Iterator, Sequence

from oscine.chat.messages import ConversationError, FunctionTool, ToolNamespace
from oscine.chat.typescript import SchemaTypes, constraints, text_lines

NAMESPACE = "functions"
TRAINED = ("browser", "python")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def validate_tools(tools: Sequence[FunctionTool]) -> None:
    """Raises ConversationError that names the first function whose name is malformed or taken."""
    seen: set[str] = set()
    for tool in tools:
        if not NAME.fullmatch(tool.name):
            raise ConversationError(
                "tools", f"function name {tool.name!r} is not 1 to 64 letters, digits, underscores or hyphens"
            )
        if tool.name in seen:
            raise ConversationError("tools", f"function name {tool.name!r} is used twice")
        seen.add(tool.name)


def tools_section(tools: Sequence[FunctionTool], namespaces: Sequence[ToolNamespace] = ()) -> str:
    """The `# Tools` section of the developer message: functions and namespaces. Empty if there are none.

    Raises ConversationError that names the tool and what is wrong.
    """
    functions = [ToolNamespace(NAMESPACE, functions=tuple(tools))] if tools else []
    return _section([*functions, *(n for n in namespaces if n.name not in TRAINED)])


def system_tools_section(namespaces: Sequence[ToolNamespace]) -> str:
    """The `# Tools` section of the system message. Empty if there are none that belong there."""
    return _section([n for n in namespaces if n.name in TRAINED])


def _section(namespaces: list[ToolNamespace]) -> str:
    parts = [_namespace(namespace) for namespace in sorted(namespaces, key=lambda n: n.name)]
    return "\n\n".join(["# Tools", *parts]) if parts else ""


def _namespace(namespace: ToolNamespace) -> str:
    name, tools = namespace.name, namespace.functions
    if not tools:
        return f"## {name}\n\n{namespace.description}"
    validate_tools(tools)
    taken = {tool.name: 1 for tool in tools}
    lines = [f"## {name}", "", *_commented(namespace.description), f"namespace {name} {{", ""]
    for tool in tools:
        try:
            lines += _declaration(tool, taken)
        except RecursionError:
            raise ConversationError("tools", f"tool {tool.name!r}: the schema is nested too deeply") from None
    return "\n".join([*lines, f"}} // namespace {name}"])


def _commented(text: str) -> list[str]:
    return [f"// {line}" for line in text_lines(text)]


def _declaration(tool: FunctionTool, taken: dict[str, int]) -> Iterator[str]:
    if tool.parameters is None:
        yield from (*_commented(tool.description), f"type {tool.name} = () => any;\n")
        return
    types = SchemaTypes(tool.parameters, tool.name, taken)
    arguments = types.type_of(tool.parameters)
    yield from types.declarations()
    yield from (*_commented(tool.description), *(f"// {said}" for said in constraints(tool.parameters)))
    yield f"type {tool.name} = (_: {arguments}) => any;\n"
