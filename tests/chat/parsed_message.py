"""A whole completion, parsed at once: what the streaming parser reports, joined."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from oscine.chat.events import ContentDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.chat.harmony_parser import HarmonyParser, Terminator, new_call_id
from oscine.chat.messages import ToolCall
from oscine.chat.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    num_tokens: int  # up to and with the terminator
    num_reasoning_tokens: int
    content_token_indices: list[int]  # which tokens the content consists of
    terminator: Terminator | None  # None: cut off
    stop_string: str | None  # the one that ended the content


def parse(
    tokenizer: Tokenizer, token_ids: Iterable[int], stop: Sequence[str] = (), call_id: Callable[[], str] = new_call_id
) -> ParsedMessage:
    """Parses what was generated behind `<|start|>assistant`; see HarmonyParser. Never raises for any tokens."""
    parser = HarmonyParser(tokenizer, stop, call_id)
    reasoning: list[str] = []
    content: list[str] = []
    indices: list[int] = []
    calls: list[tuple[ToolCallBegin, list[str]]] = []
    for event in parser.feed(token_ids) + parser.finish():
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text, token_indices):
                content.append(text)
                indices += token_indices
            case ToolCallBegin():
                calls.append((event, []))
            case ToolCallDelta(index, arguments):
                calls[index][1].append(arguments)
    return ParsedMessage(
        reasoning="".join(reasoning),
        content="".join(content),
        tool_calls=tuple(ToolCall(begin.id, begin.name, "".join(arguments)) for begin, arguments in calls),
        num_tokens=parser.num_tokens,
        num_reasoning_tokens=parser.num_reasoning_tokens,
        content_token_indices=indices,
        terminator=parser.terminator,
        stop_string=parser.stop_string,
    )
