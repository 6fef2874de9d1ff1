"""The functions that a client offers: their names checked, and how the developer message declares them.

Knows the namespace that functions live in; must not know how calls are rendered or parsed.
"""

import re
from collections.abc import Iterator, Sequence

from oscine.chat.messages import FunctionTool
from oscine.chat.typescript import SchemaTypes, constraints, text_lines

NAMESPACE = "functions"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def validate_tools(tools: Sequence[FunctionTool]) -> None:
    """Raises ValueError that names the first function whose name is malformed or taken."""
    seen: set[str] = set()
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ValueError(f"function name {tool.name!r} is not 1 to 64 letters, digits, underscores or hyphens")
        if tool.name in seen:
            raise ValueError(f"function name {tool.name!r} is used twice")
        seen.add(tool.name)


def tools_section(tools: Sequence[FunctionTool]) -> str:
    """The `# Tools` section of the developer message. Raises ValueError that names the tool and what is wrong."""
    validate_tools(tools)
    taken = {tool.name: 1 for tool in tools}
    lines = ["# Tools", "", f"## {NAMESPACE}", "", f"namespace {NAMESPACE} {{", ""]
    for tool in tools:
        try:
            lines += _declaration(tool, taken)
        except RecursionError:
            raise ValueError(f"tool {tool.name!r}: the schema is nested too deeply") from None
    return "\n".join([*lines, f"}} // namespace {NAMESPACE}"])


def _declaration(tool: FunctionTool, taken: dict[str, int]) -> Iterator[str]:
    if tool.parameters is None:
        yield from (f"// {line}" for line in text_lines(tool.description))
        yield f"type {tool.name} = () => any;\n"
        return
    types = SchemaTypes(tool.parameters, tool.name, taken)
    arguments = types.type_of(tool.parameters)
    yield from types.declarations()
    yield from (f"// {line}" for line in [*text_lines(tool.description), *constraints(tool.parameters)])
    yield f"type {tool.name} = (_: {arguments}) => any;\n"
