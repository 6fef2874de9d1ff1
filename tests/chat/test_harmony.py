import json
from dataclasses import replace

import openai_harmony as oh
import pytest
from hypothesis import given, settings

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation, FunctionTool, Message, ResponseSchema, ToolCall
from oscine.chat.tokenizer import Tokenizer

from .strategies import conversations

LOOKUP = ToolCall("call_1", "lookup", '{"city": "Oslo"}')
EFFORTS = {"low": oh.ReasoningEffort.LOW, "medium": oh.ReasoningEffort.MEDIUM, "high": oh.ReasoningEffort.HIGH}


def assistant(text: str, channel: str) -> oh.Message:
    return oh.Message.from_role_and_content(oh.Role.ASSISTANT, text).with_channel(channel)


def developer(instructions: str, tools: tuple[FunctionTool, ...] = ()) -> oh.Message:
    content = oh.DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        described = [oh.ToolDescription.new(tool.name, tool.description, tool.parameters) for tool in tools]
        content = content.with_function_tools(described)
    return oh.Message.from_role_and_content(oh.Role.DEVELOPER, content)


def response_formats(response: ResponseSchema) -> str:
    schema = json.dumps(response.schema, separators=(",", ":"), ensure_ascii=False)
    description = f"// {response.description}\n" if response.description else ""
    return f"# Response Formats\n\n## {response.name}\n\n{description}{schema}"


def oracle_messages(oracle: oh.HarmonyEncoding, conversation: Conversation) -> list[oh.Message]:
    """Every message, all of the reasoning included."""
    system = oh.SystemContent.new().with_reasoning_effort(EFFORTS[conversation.reasoning_effort])
    if conversation.current_date:
        system = system.with_conversation_start_date(conversation.current_date)
    rendered = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    messages = list(conversation.messages)
    instructions = []
    while messages and messages[0].role in ("system", "developer"):
        instructions.append(messages.pop(0).content)
    joined = "\n\n".join(filter(None, instructions))
    if joined or conversation.tools:
        rendered.append(developer(joined, conversation.tools))
    if conversation.response_schema:
        # The oracle has no such section: it goes behind the text of those that it has.
        sections = [response_formats(conversation.response_schema)]
        if joined or conversation.tools:
            text = oracle.decode(oracle.render(rendered.pop()))
            sections.insert(0, text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>"))
        rendered.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, "\n\n".join(sections)))
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        rendered += oracle_turn(message, names)
    return rendered


def oracle_turn(message: Message, names: dict[str, str]) -> list[oh.Message]:
    if message.role == "user":
        return [oh.Message.from_role_and_content(oh.Role.USER, message.content)]
    if message.role in ("system", "developer"):
        return [developer(message.content)] if message.content else []
    if message.role == "tool":
        # The recipient stands before the channel, as the format's documentation has it; the oracle puts it behind.
        author = oh.Author(role=oh.Role.TOOL, name=f"functions.{names[message.tool_call_id or '']} to=assistant")
        return [oh.Message.from_author_and_content(author, message.content).with_channel("commentary")]
    rendered = [assistant(message.reasoning, "analysis")] if message.reasoning else []
    if message.tool_calls:
        rendered += [assistant(message.content, "commentary")] if message.content else []
    elif message.content or not message.reasoning:
        rendered.append(assistant(message.content, "final"))
    for call in message.tool_calls:
        called = assistant(call.arguments, "commentary").with_recipient(f"functions.{call.name}")
        rendered.append(called.with_content_type("<|constrain|>json"))
    return rendered


def oracle_prompt(oracle: oh.HarmonyEncoding, messages: list[oh.Message], drop: bool) -> list[int]:
    conversation = oh.Conversation.from_messages(messages)
    config = oh.RenderConversationConfig(auto_drop_analysis=drop)
    return oracle.render_conversation_for_completion(conversation, oh.Role.ASSISTANT, config)


def unique_call_ids(conversation: Conversation) -> Conversation:
    """The same with an id of its own for each call."""
    messages: list[Message] = []
    turn = 0
    for message in conversation.messages:
        turn += bool(message.tool_calls)
        calls = tuple(replace(call, id=f"{call.id}_{turn}") for call in message.tool_calls)
        answered = f"{message.tool_call_id}_{turn}" if message.tool_call_id else None
        messages.append(replace(message, tool_calls=calls, tool_call_id=answered))
    return replace(conversation, messages=tuple(messages))


@pytest.mark.long
@settings(max_examples=100)
@given(conversations())
def test_renders_what_the_oracle_renders(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, conversation: Conversation
) -> None:
    conversation = unique_call_ids(conversation)
    messages = oracle_messages(oracle, conversation)
    finals = [i for i, message in enumerate(messages) if message.channel == "final"]
    last_final = max(finals, default=-1)
    kept = [m for i, m in enumerate(messages) if i > last_final or m.channel != "analysis"]
    assert renderer.render(conversation) == oracle_prompt(oracle, kept, drop=False)


@pytest.mark.long
@settings(max_examples=60)
@given(conversations(max_turns=1))
def test_drops_the_reasoning_that_the_oracle_drops(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, conversation: Conversation
) -> None:
    conversation = unique_call_ids(conversation)
    expected = oracle_prompt(oracle, oracle_messages(oracle, conversation), drop=True)
    assert renderer.render(conversation) == expected


def test_reasoning_lives_until_the_answer(renderer: HarmonyRenderer, o200k: Tokenizer) -> None:
    def prompt(*messages: Message) -> str:
        return o200k.decode(renderer.render(Conversation(messages)))

    first = (Message("user", "q1"), Message("assistant", "a1", "thought-1"), Message("user", "q2"))
    call = (Message("assistant", "", "thought-2", (LOOKUP,)), Message("tool", "rain", tool_call_id="call_1"))
    assert "thought" not in prompt(*first)
    assert "thought-1" not in prompt(*first, *call)  # gone, though the last assistant message calls a tool
    assert "thought-2" in prompt(*first, *call)
    assert "thought-2" in prompt(*first, *call, Message("assistant", "", "thought-3", (LOOKUP,)))
    assert "thought" not in prompt(*first, *call, Message("assistant", "a2"))
    assert "thought-3" in prompt(*first, Message("assistant", "", "thought-3"))  # cut before it answered


def test_prompts_grow_by_what_the_model_said(renderer: HarmonyRenderer) -> None:
    tools = (FunctionTool("lookup"),)
    asked = Conversation((Message("developer", "d"), Message("user", "q")), tools)
    called = Message("assistant", "I look.", "I need the weather.", (LOOKUP,))
    answered = replace(asked, messages=(*asked.messages, called, Message("tool", "rain", tool_call_id="call_1")))
    before = renderer.render(asked) + renderer.render_completion(called)
    after = renderer.render(answered)
    assert after[: len(before)] == before
    later = replace(answered, messages=(*answered.messages, Message("system", "Be brief."), Message("user", "and?")))
    assert renderer.render(later)[: len(after) - 2] == after[:-2]  # all but <|start|>assistant


def test_completions(renderer: HarmonyRenderer, o200k: Tokenizer) -> None:
    def completion(message: Message) -> str:
        return o200k.decode(renderer.render_completion(message))

    assert completion(Message("assistant", "Hi.", "hm")) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
    )
    call = '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"city": "Oslo"}'
    assert completion(Message("assistant", tool_calls=(LOOKUP,))) == f"{call}<|call|>"
    two = Message("assistant", "I look.", tool_calls=(LOOKUP, LOOKUP))
    preamble = "<|channel|>commentary<|message|>I look."
    assert completion(two) == f"{preamble}<|end|><|start|>assistant{call}<|end|><|start|>assistant{call}<|call|>"


def test_response_formats_follow_the_tools(renderer: HarmonyRenderer, o200k: Tokenizer) -> None:
    schema = ResponseSchema("city", {"type": "object", "$defs": {"é": {}}}, "Where to.")
    conversation = Conversation((Message("system", "Hi."),), (FunctionTool("lookup"),), schema)
    assert o200k.decode(renderer.render(conversation)).endswith(
        "<|start|>developer<|message|># Instructions\n\nHi.\n\n"
        "# Tools\n\n## functions\n\nnamespace functions {\n\ntype lookup = () => any;\n\n} // namespace functions\n\n"
        '# Response Formats\n\n## city\n\n// Where to.\n{"type":"object","$defs":{"é":{}}}<|end|><|start|>assistant'
    )


def test_the_prompt_of_nothing(byte_tokenizer: Tokenizer) -> None:
    renderer = HarmonyRenderer(byte_tokenizer)
    text = byte_tokenizer.decode(renderer.render(Conversation((), reasoning_effort="low")))
    assert text == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: low\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>assistant"
    )


def test_a_result_without_its_call_is_named(renderer: HarmonyRenderer) -> None:
    messages = (Message("user", "q"), Message("assistant", tool_calls=(LOOKUP,)), Message("tool", tool_call_id="x9"))
    with pytest.raises(ValueError, match="'x9'"):
        renderer.render(Conversation(messages))


def test_a_result_may_name_its_function_itself(renderer: HarmonyRenderer, o200k: Tokenizer) -> None:
    text = o200k.decode(renderer.render(Conversation((Message("tool", "rain", name="lookup"),))))
    assert "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>rain<|end|>" in text


@pytest.mark.parametrize("name", ["", "a b", "functions.f", "a" * 129, "é", "f\n"])
def test_a_malformed_function_name_is_refused(renderer: HarmonyRenderer, name: str) -> None:
    with pytest.raises(ValueError, match="function name"):
        renderer.render(Conversation((), (FunctionTool(name),)))


def test_a_repeated_function_name_is_refused(renderer: HarmonyRenderer) -> None:
    with pytest.raises(ValueError, match="'f' is used twice"):
        renderer.render(Conversation((), (FunctionTool("f"), FunctionTool("f"))))
