"""One exchange of a conversation. Skills generate them, and conversations consist of them."""

from dataclasses import dataclass
from typing import Any

from oscine.chat.messages import FunctionTool, Message, ReasoningEffort, ResponseSchema, ToolNamespace

Effort = ReasoningEffort


@dataclass(frozen=True)
class Episode:
    """Messages from a user's question to the final answer, tool calls and results between them included."""

    skill: str  # the name that evaluation prints
    messages: tuple[Message, ...]  # the last one is the assistant's final answer
    tools: tuple[FunctionTool, ...] = ()
    namespaces: tuple[ToolNamespace, ...] = ()  # tools of the server, which the model should not call
    response_schema: ResponseSchema | None = None
    instructions: str = ""  # goes to the developer message
    context_weight: float = 0.0  # loss weight of earlier final answers, if each of them follows from the text
    forced: bool = False  # the last message is a call that only the server's grammar forces
    number: int | None = None  # arithmetic: the result, for a follow-up question


def ask(skill: str, question: str, thought: str | None, answer: str, **rest: Any) -> Episode:
    """An episode of one question and its answer."""
    messages = (Message("user", question), Message("assistant", answer, reasoning=thought))
    return Episode(skill, messages, **rest)
