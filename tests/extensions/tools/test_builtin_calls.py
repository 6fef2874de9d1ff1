"""Built-in tools in harmony: how they are declared, called, answered and read, beside the oracle."""

from collections.abc import Sequence

import openai_harmony as oh
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.chat.events import BuiltinCallBegin, BuiltinCallDelta, ContentDelta, Event, MessageEnd, ReasoningDelta
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.messages import BuiltinCall, Conversation, FunctionTool, Message, ToolNamespace
from oscine.chat.tokenizer import Tokenizer
from oscine.extensions.tools.browser import DECLARATION

PYTHON = ToolNamespace("python", "Runs code.\n\nNothing is kept.")
ASK = FunctionTool("ask", "Asks.", {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]})
WIKI = ToolNamespace("wiki", "A wiki.", (ASK, FunctionTool("list", "Lists.")))
NAMES = ("python", "browser", "wiki")
FUNCTION = FunctionTool("f", "Does f.", {"type": "object", "properties": {"a": {"type": "string"}}})


CODE = BuiltinCall("python", "print(1)")
SEARCH = BuiltinCall("browser.search", '{"query": "wrens"}')
ASKED = BuiltinCall("wiki.ask", '{"q": "wrens"}', "commentary")


def oracle_prompt(
    oracle: oh.HarmonyEncoding, system: oh.SystemContent, developer: oh.DeveloperContent | None = None
) -> list[int]:
    messages = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    if developer is not None:
        messages.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    messages.append(oh.Message.from_role_and_content(oh.Role.USER, "hi"))
    return oracle.render_conversation_for_completion(oh.Conversation.from_messages(messages), oh.Role.ASSISTANT)


def described(namespace: ToolNamespace) -> oh.ToolNamespaceConfig:
    tools = [oh.ToolDescription.new(f.name, f.description, f.parameters) for f in namespace.functions]
    return oh.ToolNamespaceConfig(name=namespace.name, description=namespace.description, tools=tools)


def prompt(*namespaces: ToolNamespace, tools: tuple[FunctionTool, ...] = ()) -> Conversation:
    return Conversation((Message("user", "hi"),), tools, namespaces=namespaces)


@pytest.mark.long
def test_the_browser_is_declared_as_the_oracle_declares_it(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding
) -> None:
    expected = oracle_prompt(oracle, oh.SystemContent.new().with_browser_tool())
    assert renderer.render(prompt(DECLARATION)) == expected


@pytest.mark.long
def test_declarations_stand_where_the_oracle_puts_them(renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding) -> None:
    system = oh.SystemContent.new().with_browser_tool().with_tools(described(PYTHON))
    function = oh.ToolDescription.new(FUNCTION.name, FUNCTION.description, FUNCTION.parameters)
    developer = oh.DeveloperContent.new().with_function_tools([function]).with_tools(described(WIKI))
    conversation = prompt(WIKI, PYTHON, DECLARATION, tools=(FUNCTION,))
    assert renderer.render(conversation) == oracle_prompt(oracle, system, developer)
    alone = oh.DeveloperContent.new().with_tools(described(WIKI))
    assert renderer.render(prompt(WIKI)) == oracle_prompt(oracle, oh.SystemContent.new(), alone)


@pytest.mark.long
def test_a_tool_of_a_namespace_that_cannot_be_declared_is_named(renderer: HarmonyRenderer) -> None:
    twice = ToolNamespace("wiki", "", (ASK, ASK))
    with pytest.raises(ValueError, match="'ask' is used twice"):
        renderer.render(prompt(twice))


@pytest.mark.long
@pytest.mark.parametrize("call", [CODE, SEARCH, ASKED], ids=lambda call: call.recipient)
def test_what_follows_a_call_is_what_history_renders(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, call: BuiltinCall
) -> None:
    """Prompt, generated tokens and result give the prompt of the stored conversation, to the token."""
    said = Message("assistant", "", "I look it up.", builtin=call)
    before = renderer.render(prompt(DECLARATION, PYTHON, WIKI))
    generated = renderer.render_completion(said)
    assert generated[-1:] == oracle.encode("<|call|>", allowed_special="all")
    messages = (Message("user", "hi"), said, Message("tool", "a result", builtin=call))
    stored = Conversation(messages, namespaces=(DECLARATION, PYTHON, WIKI))
    assert renderer.after_call([*before, *generated], call, "a result") == renderer.render(stored)


@pytest.mark.parametrize("call", [CODE, SEARCH], ids=lambda call: call.recipient)
def test_results_have_the_oracles_header(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, call: BuiltinCall
) -> None:
    author = oh.Author(role=oh.Role.TOOL, name=call.recipient)
    result = oh.Message.from_author_and_content(author, "42").with_channel("analysis").with_recipient("assistant")
    after = renderer.after_call(oracle.encode("x<|call|>", allowed_special="all"), call, "42")
    assert after[2:] == [*oracle.render(result), *oracle.encode("<|start|>assistant", allowed_special="all")]


@pytest.mark.parametrize("ending", ["<|call|>", "<|end|>", "<|return|>", ""])
def test_a_call_is_closed_whatever_ended_it(renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, ending: str) -> None:
    written = "<|start|>assistant<|channel|>analysis to=python code<|message|>1"
    after = renderer.after_call(oracle.encode(written + ending, allowed_special="all"), CODE, "1")
    assert oracle.decode(after).startswith(
        f"{written}<|call|><|start|>python to=assistant<|channel|>analysis<|message|>1"
    )


def test_calls_in_the_analysis_go_with_it(renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding) -> None:
    turn = [m for c in (CODE, ASKED) for m in (Message("assistant", builtin=c), Message("tool", "r", builtin=c))]
    during = oracle.decode(renderer.render(Conversation((Message("user", "hi"), *turn))))
    after = oracle.decode(renderer.render(Conversation((Message("user", "hi"), *turn, Message("assistant", "a")))))
    assert "to=python" in during
    assert "python" not in after  # neither the call nor its result, as the oracle has it
    assert "to=wiki.ask" in after
    assert "<|start|>wiki.ask to=assistant<|channel|>commentary<|message|>r<|end|>" in after


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("generated", "then"),
    [
        ("", FINAL),
        ("<|channel|>ana", FINAL),
        ("<|channel|>analysis<|message|>I th", f"<|channel|>analysis<|message|>I th<|end|><|start|>assistant{FINAL}"),
        (
            "<|channel|>analysis<|message|>I<|end|>",
            f"<|channel|>analysis<|message|>I<|end|><|start|>assistant{FINAL}",
        ),
        (
            "<|channel|>analysis<|message|>I<|end|><|start|>assis",
            f"<|channel|>analysis<|message|>I<|end|><|start|>assistant{FINAL}",
        ),
    ],
)
def test_the_final_channel_can_be_forced(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, o200k: Tokenizer, generated: str, then: str
) -> None:
    before = renderer.render(prompt())
    tokens = oracle.encode(generated, allowed_special="all")
    forced = renderer.into_final([*before, *tokens])
    assert forced == [*before, *oracle.encode(then, allowed_special="all")]
    parser = HarmonyParser(o200k)
    events = parser.feed(tokens)
    events += parser.resume(forced)
    assert not parser.thinking
    events += parser.feed(oracle.encode("Yes.<|return|>", allowed_special="all"))
    assert parser.num_tokens == len(tokens) + 3
    answers = [event for event in events if isinstance(event, ContentDelta)]
    assert answers == [ContentDelta("Yes.", [len(tokens), len(tokens) + 1])]
    thoughts = [event.text for event in events if isinstance(event, ReasoningDelta)]
    assert thoughts == ([then.split("<|message|>")[1].split("<|end|>")[0]] if "<|message|>" in generated else [])


def read(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> tuple[list[Event], HarmonyParser]:
    parser = HarmonyParser(tokenizer, namespaces=NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        if isinstance(event, BuiltinCallDelta) and joined and isinstance(joined[-1], BuiltinCallDelta):
            joined[-1] = BuiltinCallDelta(joined[-1].content + event.content)
        else:
            joined.append(event)
    return joined, parser


@pytest.mark.parametrize(
    ("header", "recipient", "channel"),
    [
        ("<|channel|>analysis to=python code<|message|>", "python", "analysis"),
        ("<|channel|>analysis to=browser.open <|constrain|>json<|message|>", "browser.open", "analysis"),
        ("<|channel|>commentary to=wiki.ask <|constrain|>json<|message|>", "wiki.ask", "commentary"),
        (" to=python<|channel|>commentary code<|message|>", "python", "commentary"),
        (" to=browser.find<|channel|>analysis <|constrain|>json<|message|>", "browser.find", "analysis"),
        ("<|channel|>final to=python<|message|>", "python", "analysis"),
        ("<|channel|>commentary to=wiki<|message|>", "wiki", "commentary"),
    ],
)
@pytest.mark.parametrize("step", [1, 100])
def test_calls_are_reported_with_recipient_and_channel(
    oracle: oh.HarmonyEncoding, o200k: Tokenizer, header: str, recipient: str, channel: str, step: int
) -> None:
    ids = oracle.encode(f"{header}print(1)\n<|call|>", allowed_special="all")
    events, parser = read(o200k, [ids[i : i + step] for i in range(0, len(ids), step)])
    begin = BuiltinCallBegin(recipient, "commentary" if channel == "commentary" else "analysis")
    assert events == [begin, BuiltinCallDelta("print(1)\n"), MessageEnd("builtin_call")]
    assert (parser.terminator, parser.num_tokens, parser.num_tool_calls) == ("call", len(ids), 0)


@pytest.mark.parametrize(("ending", "kept"), [("<|end|><|start|>", 1), ("<|start|>", 0), ("<|channel|>", 0)])
def test_a_call_ends_the_reading_whatever_marker_ended_it(
    oracle: oh.HarmonyEncoding, o200k: Tokenizer, ending: str, kept: int
) -> None:
    call = oracle.encode("<|channel|>analysis to=python code<|message|>1", allowed_special="all")
    events, parser = read(o200k, [[*call, *oracle.encode(f"{ending}final more", allowed_special="all")]])
    assert events[-1] == MessageEnd("builtin_call")
    assert (parser.terminator, parser.num_tokens) == ("call", len(call) + kept)


def test_a_call_cut_by_the_limit_is_not_complete(oracle: oh.HarmonyEncoding, o200k: Tokenizer) -> None:
    _, parser = read(o200k, [oracle.encode("<|channel|>analysis to=python code<|message|>1", allowed_special="all")])
    assert parser.terminator is None


def test_reading_goes_on_behind_a_result(
    renderer: HarmonyRenderer, oracle: oh.HarmonyEncoding, o200k: Tokenizer
) -> None:
    parser = HarmonyParser(o200k, namespaces=NAMES)
    call = renderer.render_completion(Message("assistant", "", "hm", builtin=CODE))
    parser.feed(call)
    events = parser.resume(renderer.after_call([*renderer.render(prompt(PYTHON)), *call], CODE, "<|start|>1"))
    answer = renderer.render_completion(Message("assistant", "It is 1.", "so"))
    events += parser.feed(answer)
    assert events[:2] == [ReasoningDelta("\n\nso"), MessageEnd("reasoning")]
    assert isinstance(events[2], ContentDelta)
    assert events[2].text == "It is 1."
    markers = [i for i, token in enumerate(answer) if oracle.decode([token]) == "<|message|>"]
    assert events[2].token_indices[0] == len(call) + markers[-1] + 1  # counted over generated tokens alone
    assert parser.terminator == "return"


def test_a_result_that_the_model_makes_up_ends_the_turn(oracle: oh.HarmonyEncoding, o200k: Tokenizer) -> None:
    written = "<|channel|>analysis<|message|>hm<|end|><|start|>python to=assistant<|channel|>analysis<|message|>42"
    events, parser = read(o200k, [oracle.encode(written, allowed_special="all")])
    assert events == [ReasoningDelta("hm"), MessageEnd("reasoning")]
    assert parser.terminator == "turn"


def test_functions_and_unknown_namespaces_are_calls_of_the_clients(
    oracle: oh.HarmonyEncoding, o200k: Tokenizer
) -> None:
    for recipient, name in (("functions.python", "python"), ("pythonic", "pythonic"), ("mail.send", "mail.send")):
        call = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>"
        _, parser = read(o200k, [oracle.encode(call, allowed_special="all")])
        assert parser.num_tool_calls == 1, name


PIECES = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "assistant"]
WORDS = ["analysis", "commentary", " to=python", " to=browser.search", " to=functions.f", "python", " code", "x", "é "]


@pytest.mark.long
@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES + WORDS), max_size=14), st.integers(1, 20))
def test_any_stream_is_read_the_same_however_it_is_cut(
    oracle: oh.HarmonyEncoding, o200k: Tokenizer, written: list[str], step: int
) -> None:
    ids = [token for piece in written for token in oracle.encode(piece, allowed_special="all")]
    whole, parser = read(o200k, [ids])
    pieces, other = read(o200k, [ids[i : i + step] for i in range(0, len(ids), step)])
    assert "<|" not in repr([event for event in whole if not isinstance(event, MessageEnd)])
    calls = [event for event in whole if isinstance(event, BuiltinCallBegin | BuiltinCallDelta)]
    assert calls == [event for event in pieces if isinstance(event, BuiltinCallBegin | BuiltinCallDelta)]
    assert len([event for event in calls if isinstance(event, BuiltinCallBegin)]) <= 1
    assert (parser.terminator, parser.num_tokens) == (other.terminator, other.num_tokens)
