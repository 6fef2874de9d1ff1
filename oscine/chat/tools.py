"""Tools of a client and of the server: their names are checked, and they are declared to the model.

Functions of the client have a namespace of their own. gpt-oss was trained with two of the server's namespaces, which
the system message declares. All others are declared in the developer message, beside the functions.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from oscine.chat.messages import ConversationError, FunctionTool, ToolNamespace
from oscine.chat.typescript import SchemaTypes, constraints, text_lines

NAMESPACE = "functions"
TRAINED = ("browser", "python")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of a namespace
LONGEST_NAME = 128  # characters of a function's name in a prompt
_SEPARATOR = "__"  # between a namespace and a name
_CHARACTERS = re.compile(r"[a-zA-Z0-9_-]+")
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]+")


def validate_tools(tools: Sequence[FunctionTool], longest: int = LONGEST_NAME) -> None:
    """Raises ConversationError that names the first function whose name is malformed or taken.

    `longest`: the most characters of a name.
    """
    seen: set[str] = set()
    for tool in tools:
        if not _is_plain(tool.name, longest):
            given = tool.name[: 2 * LONGEST_NAME]
            raise ConversationError(
                "tools", f"function name {given!r} is not 1 to {longest} letters, digits, underscores or hyphens"
            )
        if tool.name in seen:
            raise ConversationError("tools", f"function name {tool.name!r} is used twice")
        seen.add(tool.name)


class ModelNames:
    """The names that the model sees for functions that clients may name as they like.

    A function is the words of its name, a namespace's first. A name that harmony holds stays, unless another function
    has it. Other characters become underscores. A longer name is cut, and a taken one gets a number.
    """

    def __init__(self, functions: Iterable[tuple[str, ...]] = ()) -> None:
        self._seen: dict[tuple[str, ...], str] = {}
        self._taken: dict[str, int] = {}  # with the last number that was appended to make another one
        for words in sorted(functions, key=lambda words: not _is_plain(_SEPARATOR.join(words))):
            self.seen(*words)

    def seen(self, *words: str) -> str:
        """The model's name for a function, always the same."""
        if words not in self._seen:
            stem = (_OTHERS.sub("_", _SEPARATOR.join(words)) or "_")[:LONGEST_NAME]
            name = stem
            while name in self._taken:
                self._taken[stem] += 1
                number = f"_{self._taken[stem]}"
                name = stem[: LONGEST_NAME - len(number)] + number
            self._taken[name] = 1
            self._seen[words] = name
        return self._seen[words]


def _is_plain(name: str, longest: int = LONGEST_NAME) -> bool:
    return len(name) <= longest and _CHARACTERS.fullmatch(name) is not None


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
    if tool.input is not None:
        form = "grammar in Lark's syntax" if tool.input.syntax == "lark" else "regular expression"
        said = (tool.description, f"The input is plain text, not JSON. It matches this {form}:", tool.input.definition)
        yield from (line for text in said for line in _commented(text))
        yield f"type {tool.name} = (_: string) => any;\n"
        return
    if tool.parameters is None:
        yield from (*_commented(tool.description), f"type {tool.name} = () => any;\n")
        return
    types = SchemaTypes(tool.parameters, tool.name, taken)
    arguments = types.type_of(tool.parameters)
    yield from types.declarations()
    yield from (*_commented(tool.description), *(f"// {said}" for said in constraints(tool.parameters)))
    yield f"type {tool.name} = (_: {arguments}) => any;\n"
