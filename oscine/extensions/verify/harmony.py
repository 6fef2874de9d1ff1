"""Harmony prompts and completions, rendered and parsed here and by the library openai_harmony.

Texts are compared, since a model may have a vocabulary of its own; with harmony's vocabulary token ids are as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from oscine.chat.events import ContentDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.messages import Conversation, FunctionTool, Message, ToolCall
from oscine.chat.tokenizer import Tokenizer

DATE = "2025-11-03"
WEATHER = FunctionTool(
    "get_weather",
    "Gets the weather.",
    {"type": "object", "properties": {"city": {"type": "string", "description": "Name"}}, "required": ["city"]},
)
_CALL = ToolCall("call_1", "get_weather", '{"city":"Osaka"}')
_ASKED = Message("user", "What is the weather in Osaka?")
_EARLIER = (Message("user", "What is 2 + 3?"), Message("assistant", "2 + 3 = 5.", "They want a sum."))
PROMPTS = {
    "question": Conversation((Message("user", "What is 27 + 58?"),), current_date=DATE),
    "high effort": Conversation((Message("user", "Why?\n\nTell me."),), reasoning_effort="high", current_date=DATE),
    "instructions": Conversation((Message("system", "Answer briefly."), Message("user", "Hello!")), current_date=DATE),
    "special tokens in text": Conversation((Message("user", "What is <|end|><|call|>?"),), current_date=DATE),
    "second turn": Conversation((*_EARLIER, Message("user", "And 4 more?")), current_date=DATE),
    "function": Conversation((Message("system", "Use tools."), _ASKED), (WEATHER,), current_date=DATE),
    "result of a call": Conversation(
        (_ASKED, Message("assistant", "", "I call it.", (_CALL,)), Message("tool", "rain", tool_call_id="call_1")),
        (WEATHER,),
        current_date=DATE,
    ),
}
COMPLETIONS = {
    "answer": Message("assistant", "27 + 58 = 85."),
    "reasoning and answer": Message("assistant", "It is 85.\n", "27 + 58: 7 + 8 = 15, ..."),
    "reasoning and call": Message("assistant", "", "The tool knows it.", (_CALL,)),
}


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]  # names and arguments


@dataclass(frozen=True, slots=True)
class HarmonyResult:
    library: str
    prompts: int
    completions: int
    same_vocabulary: bool  # so that token ids were compared
    differences: tuple[str, ...]


def check(tokenizer: Tokenizer) -> HarmonyResult:
    import openai_harmony

    oracle = openai_harmony.load_harmony_encoding("HarmonyGptOss")
    renderer = HarmonyRenderer(tokenizer)
    text = "What is 27 + 58? <code>naïve</code>"
    same = tokenizer.encode(text) == oracle.encode(text) and tokenizer.start == 200006
    differences = [*_prompts(renderer, tokenizer, oracle, same=same), *_completions(renderer, tokenizer, oracle)]
    name = f"oss-harmony {version('oss-harmony')}"
    return HarmonyResult(name, len(PROMPTS), len(COMPLETIONS), same, tuple(differences))


def _prompts(renderer: HarmonyRenderer, tokenizer: Tokenizer, oracle: Any, *, same: bool) -> Iterator[str]:
    for name, conversation in PROMPTS.items():
        ids, wanted = renderer.render(conversation), _rendered(oracle, conversation)
        if tokenizer.decode(ids) != oracle.decode(wanted) or (same and ids != wanted):
            yield f"prompt {name!r}"


def _completions(renderer: HarmonyRenderer, tokenizer: Tokenizer, oracle: Any) -> Iterator[str]:
    """What is rendered here is read by both parsers."""
    for name, message in COMPLETIONS.items():
        wanted = Parsed(
            message.reasoning or "", message.content, tuple((call.name, call.arguments) for call in message.tool_calls)
        )
        ids = renderer.render_completion(message)
        if parsed(tokenizer, ids) != wanted or _read_by(oracle, tokenizer.decode(ids)) != wanted:
            yield f"completion {name!r}"


def parsed(tokenizer: Tokenizer, token_ids: list[int]) -> Parsed:
    """A completion, read by the parser of the server."""
    parser = HarmonyParser(tokenizer)
    reasoning, content, calls = "", "", list[list[str]]()
    for event in (*parser.feed(token_ids), *parser.finish()):
        if isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ToolCallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallDelta):
            calls[event.index][1] += event.arguments
    return Parsed(reasoning, content, tuple((name, arguments) for name, arguments in calls))


def _read_by(oracle: Any, text: str) -> Parsed:
    from openai_harmony import Role

    ids = oracle.encode(text, allowed_special="all")
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for message in oracle.parse_messages_from_completion_tokens(ids, Role.ASSISTANT):
        said = "".join(part.text for part in message.content)
        if message.recipient:
            calls.append((message.recipient.removeprefix("functions."), said))
        elif message.channel == "analysis":
            reasoning += said
        else:
            content += said
    return Parsed(reasoning, content, tuple(calls))


def _rendered(oracle: Any, conversation: Conversation) -> list[int]:
    """The prompt as the library renders it."""
    import openai_harmony as library

    effort = library.ReasoningEffort[conversation.reasoning_effort.upper()]
    system = library.SystemContent.new().with_reasoning_effort(effort)
    system = system.with_conversation_start_date(conversation.current_date)
    of_role = library.Message.from_role_and_content
    made = [of_role(library.Role.SYSTEM, system)]
    instructions = [message.content for message in conversation.messages if message.role == "system"]
    if instructions or conversation.tools:
        developer = library.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        tools = [library.ToolDescription.new(x.name, x.description, x.parameters) for x in conversation.tools]
        made.append(of_role(library.Role.DEVELOPER, developer.with_function_tools(tools) if tools else developer))
    for message in conversation.messages:
        made += _turn(library, message)
    whole = library.Conversation.from_messages(made)
    ids: list[int] = oracle.render_conversation_for_completion(whole, library.Role.ASSISTANT)
    return ids


def _turn(library: Any, message: Message) -> Iterator[Any]:
    of_role, role = library.Message.from_role_and_content, library.Role
    if message.role == "user":
        yield of_role(role.USER, message.content)
    if message.role == "tool":
        # The recipient is before the channel, as the format's documentation has it. The library has it after that.
        author = library.Author(role=role.TOOL, name=f"functions.{_CALL.name} to=assistant")
        yield library.Message.from_author_and_content(author, message.content).with_channel("commentary")
    if message.role == "assistant":
        if message.reasoning:
            yield of_role(role.ASSISTANT, message.reasoning).with_channel("analysis")
        for call in message.tool_calls:
            called = of_role(role.ASSISTANT, call.arguments).with_channel("commentary")
            yield called.with_recipient(f"functions.{call.name}").with_content_type("<|constrain|>json")
        if message.content:
            yield of_role(role.ASSISTANT, message.content).with_channel("final")
