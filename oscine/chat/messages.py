"""A conversation as typed records. The API decodes requests into them, and harmony renders them."""

from dataclasses import dataclass
from typing import Any, Literal

ReasoningEffort = Literal["low", "medium", "high"]


class ConversationError(ValueError):
    """A conversation that has no rendering. `param` is its field with the error."""

    def __init__(self, param: Literal["messages", "tools"], why: str) -> None:
        super().__init__(why)
        self.param = param


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str  # of the function, without the namespace
    arguments: str  # JSON text, exactly as the model wrote it
    raw: bool = False  # whether the arguments are plain text instead: see FunctionTool.input


@dataclass(frozen=True, slots=True)
class BuiltinCall:
    """A call that the server itself answers."""

    recipient: str  # with its namespace: python, browser.search, label.tool
    content: str  # code or JSON text, exactly as the model wrote it
    channel: Literal["analysis", "commentary"] = "analysis"


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """The form of an input that is plain text."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class FunctionTool:
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool = False  # whether arguments must satisfy it, or the input its grammar
    input: InputGrammar | None = None  # of a tool that takes plain text, and no JSON


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str | None = None  # assistant: the analysis before the content or the tool calls
    tool_calls: tuple[ToolCall, ...] = ()  # assistant
    tool_call_id: str | None = None  # tool: which call this answers
    name: str | None = None  # tool: the function's name, if the caller gave it
    builtin: BuiltinCall | None = None  # assistant: calls it; tool: the content is its result
    tools: tuple[FunctionTool, ...] = ()  # tool, developer: functions that may be called from here on
    after_tools: bool = False  # system, developer: at the begin of a conversation it follows the tools' declarations


@dataclass(frozen=True, slots=True)
class ToolNamespace:
    """Tools that the server itself answers, as they are declared to the model."""

    name: str
    description: str = ""
    # none: the namespace itself is the one tool, with nothing but its description
    functions: tuple[FunctionTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseSchema:
    """A schema for the final answer, rendered under `# Response Formats`."""

    name: str
    schema: dict[str, Any]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[FunctionTool, ...] = ()
    response_schema: ResponseSchema | None = None
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str = ""  # YYYY-MM-DD; empty: no date line
    namespaces: tuple[ToolNamespace, ...] = ()

    @property
    def functions(self) -> tuple[FunctionTool, ...]:
        """All that may be called: those declared before the conversation, and those found in it."""
        return (*self.tools, *(tool for message in self.messages for tool in message.tools))
