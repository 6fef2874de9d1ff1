"""A conversation as harmony tokens: the prompt of the model, and the completion that it is expected to produce."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, takewhile

from oscine.chat.messages import BuiltinCall, Conversation, ConversationError, Message, ResponseSchema
from oscine.chat.tokenizer import Tokenizer
from oscine.chat.tools import NAMESPACE, TRAINED, system_tools_section, tools_section
from oscine.chat.typescript import compact_json, text_lines

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
FUNCTION_CHANNEL = f"Calls to these tools must go to the commentary channel: '{NAMESPACE}'."

_Piece = str | int  # text to encode, or a special id
_MAX_KEPT = 256  # fixed texts whose ids are kept


class _Fixed(str):
    """Text of no client, which prompts repeat."""

    __slots__ = ()


_SYSTEM, _DEVELOPER, _USER, _ASSISTANT = map(_Fixed, ("system", "developer", "user", "assistant"))
_ANALYSIS, _COMMENTARY, _FINAL = map(_Fixed, ("analysis", "commentary", "final"))


class PromptTooLong(Exception):  # noqa: N818  (reads as what it is)
    """A conversation that no context holds."""


class HarmonyRenderer:
    """Renders conversations with one tokenizer.

    A prompt is a prefix of the next turn's prompt, until a final answer drops the reasoning before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode_fixed = lru_cache(_MAX_KEPT)(tokenizer.encode)

    def render(self, conversation: Conversation, most: int | None = None) -> list[int]:
        """The prompt, up to and with `<|start|>assistant`.

        Raises ConversationError for a tool that cannot be declared or a tool_call_id without a call. Raises
        PromptTooLong for a conversation that certainly has more than `most` tokens, without holding them all.
        """
        pieces = self._pieces(conversation)
        if most is not None and self._tokenizer.exceeds(_texts(pieces), most):
            raise PromptTooLong
        return self._encode(pieces)

    def count(self, conversation: Conversation, most: int | None = None) -> int:
        """The number of tokens of `render`, at most `most`, without all tokens in memory."""
        pieces = self._pieces(conversation)
        texts = _texts(pieces)
        num_special = len(pieces) - len(texts)
        return num_special + self._tokenizer.count(texts, None if most is None else most - num_special)

    def _pieces(self, conversation: Conversation) -> list[_Piece]:
        return [*self._prompt(conversation), self._tokenizer.start, _ASSISTANT]

    def render_completion(self, message: Message) -> list[int]:
        """The tokens that the model generates after the prompt for an assistant `message`, its terminator included.

        Reasoning, then the content (a preamble when calls follow), then the calls. Only the last call ends in <|call|>,
        where generation stops; those before it end in <|end|>.
        """
        assert message.role == "assistant"
        token = self._tokenizer
        pieces = [*self._assistant(message, keep_reasoning=True)]
        pieces = [token.end if piece == token.call else piece for piece in pieces[:-1]]
        calls = message.tool_calls or message.builtin
        return self._encode([*pieces[2:], token.call if calls else token.return_])

    def after_call(self, tokens: Sequence[int], call: BuiltinCall, result: str) -> list[int]:
        """The prompt that continues after the result of a built-in call.

        `tokens`: the prompt so far and the tokens generated after it, including the one that ended the call.
        """
        token = self._tokenizer
        kept = len(tokens)
        while tokens[kept - 1] in (token.call, token.end, token.return_, token.endoftext):
            kept -= 1
        return [*tokens[:kept], token.call, *self._encode([*self._result(call, result), token.start, _ASSISTANT])]

    def after_user(self, prompt: Sequence[int], text: str) -> list[int]:
        """The prompt with a user's message at its end. `prompt`: up to and with `<|start|>assistant`."""
        token = self._tokenizer
        begin = len(self._encode([token.start, _ASSISTANT]))
        return [*prompt[:-begin], *self._encode([*self._message(_USER, text), token.start, _ASSISTANT])]

    def into_final(self, tokens: Sequence[int]) -> list[int]:
        """The prompt that makes the model answer: ends an open message, drops an incomplete header, and opens a final
        message. `tokens`: the prompt so far and the tokens generated after it.
        """
        token = self._tokenizer
        kept = len(tokens)
        while (last := tokens[kept - 1]) not in (token.start, token.message, token.end, token.call, token.return_):
            kept -= 1
        if last == token.message:
            closed = [*tokens, token.end, token.start]
        else:
            closed = [*tokens[:kept]] if last == token.start else [*tokens[:kept], token.start]
        return closed + self._encode([_ASSISTANT, token.channel, _FINAL, token.message])

    def _encode(self, pieces: list[_Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif isinstance(piece, _Fixed):
                ids += self._encode_fixed(piece)
            else:
                ids += self._tokenizer.encode(piece)
        return ids

    def _prompt(self, conversation: Conversation) -> Iterator[_Piece]:
        text = self._system_text(conversation)
        yield from self._message(_SYSTEM, text if conversation.namespaces else _Fixed(text))
        messages = conversation.messages
        groups = [(key, [*group]) for key, group in groupby(messages, lambda m: m.role in ("system", "developer"))]
        leading = groups.pop(0)[1] if groups and groups[0][0] else []
        first = [*takewhile(lambda m: not m.after_tools, leading)]
        sections = _instructions(first)
        functions = (*conversation.tools, *(tool for message in leading for tool in message.tools))
        if tools := tools_section(functions, conversation.namespaces):
            sections.append(tools)
        if conversation.response_schema is not None:
            sections.append(_response_formats(conversation.response_schema))
        yield from self._developer(sections)
        yield from self._developer(_instructions(leading[len(first) :]))
        yield from self._turns(groups)

    def _turns(self, groups: list[tuple[bool, list[Message]]]) -> Iterator[_Piece]:
        """The messages after the leading instructions, in order; later instructions keep their place."""
        num_finals_left = sum(is_final(message) for _, group in groups for message in group)
        names: dict[str, str] = {}  # tool_call_id -> function
        for instructing, group in groups:
            if instructing:
                yield from self._developer([*_instructions(group), *_late_tools(group)])
                continue
            for message in group:
                if message.role == "user":
                    yield from self._message(_USER, message.content)
                elif message.role == "tool" and message.builtin:
                    if message.builtin.channel != "analysis" or num_finals_left == 0:
                        yield from self._result(message.builtin, message.content)
                elif message.role == "tool":
                    yield from self._tool_result(message, names)
                    yield from self._developer(_late_tools([message]))
                else:
                    names.update((call.id, call.name) for call in message.tool_calls)
                    yield from self._assistant(message, keep_reasoning=num_finals_left == 0)
                    num_finals_left -= is_final(message)

    def _message(self, header: str, text: str, channel: str | None = None) -> Iterator[_Piece]:
        token = self._tokenizer
        yield from (token.start, header)
        if channel is not None:
            yield from (token.channel, channel)
        yield from (token.message, text, token.end)

    def _developer(self, sections: list[str]) -> Iterator[_Piece]:
        if sections:
            yield from self._message(_DEVELOPER, "\n\n".join(sections))

    def _assistant(self, message: Message, keep_reasoning: bool) -> Iterator[_Piece]:
        if message.reasoning and keep_reasoning:
            yield from self._message(_ASSISTANT, message.reasoning, _ANALYSIS)
        if is_final(message):
            yield from self._message(_ASSISTANT, message.content, _FINAL)
        elif message.content:
            yield from self._message(_ASSISTANT, message.content, _COMMENTARY)
        for call in message.tool_calls:
            yield from self._call("commentary", f"{NAMESPACE}.{call.name}", call.arguments, code=call.raw)
        builtin = message.builtin
        if builtin and (builtin.channel != "analysis" or keep_reasoning):
            code = builtin.recipient.split(".")[0] in TRAINED
            yield from self._call(builtin.channel, builtin.recipient, builtin.content, code=code)

    def _call(self, channel: str, recipient: str, content: str, *, code: bool) -> Iterator[_Piece]:
        """As gpt-oss writes it: `code` for the tools that it was trained with and for plain text, else JSON."""
        token = self._tokenizer
        yield from (token.start, _ASSISTANT, token.channel)
        if code:
            yield f"{channel} to={recipient} code"
        else:
            yield from (f"{channel} to={recipient} ", token.constrain, "json")
        yield from (token.message, content, token.call)

    def _result(self, call: BuiltinCall, result: str) -> Iterator[_Piece]:
        return self._message(f"{call.recipient} to=assistant", result, call.channel)

    def _tool_result(self, message: Message, names: dict[str, str]) -> Iterator[_Piece]:
        name = message.name if message.tool_call_id is None else names.get(message.tool_call_id)
        if name is None:
            why = f"tool message answers tool_call_id {message.tool_call_id!r}, which no earlier message calls"
            raise ConversationError("messages", why)
        yield from self._message(f"{NAMESPACE}.{name} to=assistant", message.content, _COMMENTARY)

    def _system_text(self, conversation: Conversation) -> str:
        date = f"\nCurrent date: {conversation.current_date}" if conversation.current_date else ""
        channels = f"{CHANNELS}\n{FUNCTION_CHANNEL}" if conversation.tools else CHANNELS
        tools = system_tools_section(conversation.namespaces)
        parts = [IDENTITY + date, f"Reasoning: {conversation.reasoning_effort}", tools, channels]
        return "\n\n".join(part for part in parts if part)


def _texts(pieces: list[_Piece]) -> list[str]:
    return [piece for piece in pieces if isinstance(piece, str)]


def is_final(message: Message) -> bool:
    """Whether an assistant message is an answer: no calls, and not reasoning that was cut short."""
    if message.role != "assistant" or message.tool_calls or message.builtin:
        return False
    return bool(message.content or not message.reasoning)


def _instructions(messages: list[Message]) -> list[str]:
    """The `# Instructions` section: the joined text of messages; nothing if they are blank."""
    said = [message.content for message in messages if message.content]
    return ["# Instructions", *said] if said else []


def _late_tools(messages: list[Message]) -> list[str]:
    """The `# Tools` section of functions that are found within a conversation, so that its begin stays as it was."""
    section = tools_section([tool for message in messages for tool in message.tools])
    return [section] if section else []


def _response_formats(response: ResponseSchema) -> str:
    description = "".join(f"// {line}\n" for line in text_lines(response.description))
    return f"# Response Formats\n\n## {response.name}\n\n{description}{compact_json(response.schema)}"
