"""Compaction in Anthropic's Messages: what a request asks for, and the blocks that stand for a conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from oscine.api.common.errors import APIError, invalid
from oscine.api.serving.schemas import ChatCompletionRequest, ContentPart, Message, convert
from oscine.chat import messages as chat
from oscine.extensions.apis.anthropic.schemas import (
    AnthropicMessage,
    Block,
    CompactEdit,
    CountTokensRequest,
    MessagesRequest,
)
from oscine.extensions.apis.compaction.seal import Compacted, Seal
from oscine.extensions.apis.compaction.summary import ASK, kept, summarised

_KIND = "compaction"  # type of the blocks
_EDIT = "compact_20260112"
_USUAL_TOKENS = 150_000  # Anthropic's trigger
_FULL = 0.75  # of a context that is smaller than that


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for."""

    threshold: int  # tokens of a prompt from which on it is compacted
    alone: bool = False  # whether the answer ends with the compaction
    ask: str = ASK  # what the model is told to write
    signed: bool = False  # whether the block has a signature, and none may be had without a summary


def wanted_compaction(body: MessagesRequest, max_model_len: int) -> Wanted | None:
    """Raises APIError that names what is wrong."""
    edits = body.context_management.edits if body.context_management else []
    found = [i for i, edit in enumerate(edits) if edit.get("type") == _EDIT]
    if len(found) > 1:
        raise invalid(f"context_management.edits[{found[1]}]", f"there is one of type {_EDIT!r} before it")
    if body.compaction is not None:
        last = body.messages[-1] if body.messages else None
        blocks = last.content if last is not None and last.role == "assistant" else ()
        if any(isinstance(block, Block) and block.type == "tool_use" for block in blocks):
            raise _refused("incomplete_turn", "messages", "the last turn waits for the results of its tools")
        if found:
            raise invalid("compaction", f"it cannot stand beside an edit of type {_EDIT!r}")
        return Wanted(0, alone=True, ask=(body.compaction.instructions or "").strip() or ASK, signed=True)
    if not found:
        return None
    edit = convert(edits[found[0]], CompactEdit, f"context_management.edits[{found[0]}]")
    usual = min(_USUAL_TOKENS, int(_FULL * max_model_len))
    ask = f"{ASK}\n\n{edit.instructions}" if edit.instructions else ASK
    return Wanted(edit.trigger.value if edit.trigger else usual, bool(edit.pause_after_compaction), ask)


def expanded(body: CountTokensRequest, seal: Seal) -> list[AnthropicMessage]:
    """The messages with what the last compaction stands for in place of all before it. Raises APIError."""
    last: tuple[int, int, Compacted] | None = None
    for i, message in enumerate(body.messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.type == _KIND and (compacted := _opened(block, message.role, f"messages[{i}].content[{j}]", seal)):
                last = i, j, compacted
    messages = body.messages
    if last is not None:
        i, j, compacted = last
        cut = messages[i]
        rest = [replace(cut, content=cut.content[j + 1 :])] if len(cut.content) > j + 1 else []
        messages = [*_stands_for(compacted), *rest, *messages[i + 1 :]]
    return [*_without_failed(messages)]


def _without_failed(messages: Sequence[AnthropicMessage]) -> Iterator[AnthropicMessage]:
    """Without the blocks of compactions that failed."""
    for message in messages:
        if isinstance(message.content, list) and any(block.type == _KIND for block in message.content):
            left = [block for block in message.content if block.type != _KIND]
            if left:
                yield replace(message, content=left)
        else:
            yield message


def _opened(block: Block, role: str, where: str, seal: Seal) -> Compacted | None:
    """None for a compaction that failed."""
    if block.content is None:
        return None
    if role == "system":
        raise _refused("block_misplaced", where, "a system message cannot have a compaction")
    if not isinstance(block.content, str) or not block.content:
        raise invalid(f"{where}.content", "it is a text that is not empty, or null")
    field = "signature" if block.signature else "encrypted_content"
    sealed = getattr(block, field)
    if not sealed:
        return Compacted(block.content)
    found = seal.open(sealed)
    if found is None:
        raise _refused("signature_invalid", f"{where}.{field}", "it was changed, or written by another server")
    if found.summary != block.content:
        raise _refused("content_mismatch", f"{where}.content", f"it is not the text of its '{field}'")
    return found


def _refused(code: str, where: str, why: str) -> APIError:
    error = invalid(where, why)
    error.details = {"error_code": f"compaction_{code}"}
    return error


def _stands_for(compacted: Compacted) -> Iterator[AnthropicMessage]:
    for role, text in compacted.said or ():
        yield AnthropicMessage("user" if role == "user" else "system", text)
    if compacted.found:
        yield AnthropicMessage("system", [Block("tool_addition", tool={"name": name}) for name in compacted.found])
    yield AnthropicMessage("user", summarised(compacted.summary).content)


def compacted_by(
    summary: str, said: Sequence[chat.Message], request: ChatCompletionRequest, max_model_len: int
) -> Compacted:
    """`said`: the conversation without the system text of the request."""
    fixed: list[tuple[str, str]] = [(str(of.role), of.content) for of in kept(said, max_model_len)]
    return Compacted(summary, fixed, _found(request))


def continued(request: ChatCompletionRequest, system: Sequence[Message], compacted: Compacted) -> ChatCompletionRequest:
    """The request with the compaction in place of its conversation. `system`: the messages before that."""
    role: dict[str, Literal["user", "system"]] = {"user": "user"}
    said = [Message(role.get(of, "system"), text) for of, text in compacted.said or ()]
    references = [ContentPart("tool_reference", tool_name=name) for name in compacted.found]
    found = [Message("system", [ContentPart("text", ""), *references])] if references else []
    messages = [*system, *said, *found, Message("user", summarised(compacted.summary).content)]
    return replace(request, messages=messages)


def _found(request: ChatCompletionRequest) -> list[str]:
    """The names of tools that the conversation has found."""
    parts: Iterator[Any] = (
        part for message in request.messages if isinstance(message.content, list) for part in message.content
    )
    return [*dict.fromkeys(str(part.tool_name) for part in parts if part.type == "tool_reference")]
