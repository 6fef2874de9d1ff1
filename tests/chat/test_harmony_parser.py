from collections.abc import Callable, Iterable, Sequence
from itertools import count

import openai_harmony as oh
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oscine.chat.events import ContentDelta, Event, MessageEnd, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.messages import Message, ToolCall
from oscine.chat.tokenizer import Tokenizer

from .parsed_message import ParsedMessage, parse
from .strategies import names, texts

# As many pieces of headers as of text, and ids that harmony knows nothing of.
MARKERS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")]
WORDS = ["assistant", "analysis", "commentary", "final", " to=functions.f", " to=g", "user", " json", "functions.f"]
WORDS += ["ANALYSIS", "assistantfinal", " to=functions. f", "commentary to=functions.f"]
PLAIN = ["Hello", " world", "é", "\n", " ", "{}", "1 2 3 ", "to", " to", "=", "日本"]
tokens = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from([*WORDS, *PLAIN]),
    st.sampled_from([201088, 1 << 30, 200000]),
    st.binary(min_size=1, max_size=2).filter(lambda data: not set(data) & set(b"<|>")),
)


def numbered_ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"call_{next(numbers)}"


def ids_of(oracle: oh.HarmonyEncoding, tokenizer: Tokenizer, parts: Iterable[str | int | bytes]) -> list[int]:
    """Token ids: markers by name, single bytes as their own tokens."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += oracle.encode(part, allowed_special="all")
        elif isinstance(part, bytes):
            ids += [next(i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte])) for byte in part]
        else:
            ids.append(part)
    return ids


def join(events: list[Event]) -> list[Event]:
    """Neighbouring deltas of one message as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text, last.token_indices + event.token_indices)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            joined[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        else:
            joined.append(event)
    return joined


def run(tokenizer: Tokenizer, pieces: Iterable[Sequence[int]], stop: Sequence[str] = ()) -> tuple[list[Event], object]:
    parser = HarmonyParser(tokenizer, stop, numbered_ids())
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    counts = (parser.terminator, parser.stop_string, parser.num_tokens, parser.num_reasoning_tokens)
    return join(events), (*counts, parser.num_tool_calls)


@pytest.fixture(scope="session")
def says(oracle: oh.HarmonyEncoding, o200k: Tokenizer) -> Callable[..., ParsedMessage]:
    """Parses text in which markers are written by name."""

    def parse_text(text: str, stop: Sequence[str] = ()) -> ParsedMessage:
        return parse(o200k, oracle.encode(text, allowed_special="all"), stop, numbered_ids())

    return parse_text


@pytest.mark.parametrize(
    "text",
    [
        "commentary to=functions.f<|message|>{}<|call|>",
        "Commentary to=functions.f json<|message|>{}<|call|>",
        "<|end|><|start|>assistantcommentary to=functions.f<|message|>{}<|call|>",
        "<|end|><|start|>assistant commentary to=functions.f {}<|call|>",
        "<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>",
        "<|channel|>commentary<|constrain|> to=functions.f<|message|>{}<|call|>",
        "<|channel|>commentary <|constrain|>json to=functions.f {}<|call|>",
        "<|channel|>commentary to=functions. f<|message|>{}<|call|>",
        "<|channel|>commentary to=functions. f <|constrain|>json<|message|>{}<|call|>",
        " to=functions. f<|channel|>commentary<|message|>{}<|call|>",
        " to=functions. f {}<|call|>",
        "<|channel|>COMMENTARY to=functions.f<|message|>{}<|call|>",
    ],
)
def test_calls_with_odd_headers(says: Callable[..., ParsedMessage], text: str) -> None:
    for whole in (text, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{text}"):
        found = says(whole)
        assert [(call.name, call.arguments) for call in found.tool_calls] == [("f", "{}")]
        assert found.content == ""


@pytest.mark.parametrize(
    ("header", "reasoning"),
    [
        ("<|channel|>ANALYSIS", True),
        ("<|channel|>Analysis ", True),
        ("ANALYSIS", True),
        ("<|end|><|start|>assistantanalysis", True),
        ("<|end|><|start|>assistantfinal", False),
        ("<|end|><|start|>assistant<|channel|>FINAL", False),
        ("<|end|><|start|>assistantFinal json", False),
    ],
)
def test_channels_however_they_are_spelled(says: Callable[..., ParsedMessage], header: str, reasoning: bool) -> None:
    found = says(f"{header}<|message|>Yes.<|return|>")
    assert (found.reasoning, found.content) == (("Yes.", "") if reasoning else ("", "Yes."))


@pytest.mark.parametrize("text", ["Final answer: 4", "Analysis to follow", "commentary to be", "assistantfinality"])
def test_words_of_a_header_begin_texts_too(says: Callable[..., ParsedMessage], text: str) -> None:
    assert says(f"{text}<|return|>").content == text


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("<|channel|>commentary to=functions.f", "tool_call"),
        (" to=functions.f<|channel|>commentary", "tool_call"),
        ("<|channel|>commentary to=functions.g <|constrain|>json", "reasoning"),
        (" to=g<|channel|>commentary", "reasoning"),
        ("<|channel|>analysis to=functions.ff", "reasoning"),
        ("<|channel|>final to=g", "content"),
    ],
)
def test_functions_that_may_not_be_called_are_not(
    oracle: oh.HarmonyEncoding, o200k: Tokenizer, header: str, kind: str
) -> None:
    parser = HarmonyParser(o200k, functions=["f"])
    events = parser.feed(ids_of(oracle, o200k, [f"{header}<|message|>", "{}", "<|call|>"]))
    assert [event for event in events if isinstance(event, MessageEnd)] == [MessageEnd(kind)]  # type: ignore[arg-type]
    assert parser.num_tool_calls == (kind == "tool_call")
    assert parser.terminator == "call"


@pytest.mark.long
@settings(max_examples=500)
@given(parts=st.lists(tokens, max_size=25), sizes=st.lists(st.integers(1, 6), min_size=1), guarded=st.booleans())
@example(parts=["<|message|>", b"\xe6", "<|end|>", "Hello"], sizes=[1], guarded=True)
def test_any_tokens_in_any_pieces_say_the_same(
    o200k: Tokenizer, oracle: oh.HarmonyEncoding, parts: list[str | int | bytes], sizes: list[int], guarded: bool
) -> None:
    ids = ids_of(oracle, o200k, parts)
    stop = ["lo w", "3 1", "é"] if guarded else []
    pieces: list[list[int]] = []
    while (taken := sum(map(len, pieces))) < len(ids):
        pieces.append(ids[taken : taken + sizes[len(pieces) % len(sizes)]])
    events, counts = run(o200k, [ids], stop)
    assert run(o200k, pieces, stop) == (events, counts)
    for event in events:
        text = getattr(event, "text", "") + getattr(event, "arguments", "") + getattr(event, "name", "")
        assert not set(text) & set("<|>")  # no marker: no token has such a character
    indices = [index for event in events if isinstance(event, ContentDelta) for index in event.token_indices]
    assert indices == sorted(set(indices))
    assert not any(o200k.is_special(ids[index]) for index in indices)


@pytest.mark.long
@settings(max_examples=200)
@given(content=texts, reasoning=st.none() | texts, calls=st.lists(st.tuples(names, texts), max_size=3))
def test_what_is_rendered_is_parsed(
    renderer: HarmonyRenderer,
    oracle: oh.HarmonyEncoding,
    o200k: Tokenizer,
    content: str,
    reasoning: str | None,
    calls: list[tuple[str, str]],
) -> None:
    calls_made = tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls))
    ids = renderer.render_completion(Message("assistant", content, reasoning, calls_made))
    parsed = parse(o200k, ids, call_id=numbered_ids())
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (content, reasoning or "", calls_made)
    assert (parsed.terminator, parsed.num_tokens) == ("call" if calls else "return", len(ids))
    assert parsed.num_reasoning_tokens == len(o200k.encode(reasoning or ""))
    assert o200k.decode([ids[index] for index in parsed.content_token_indices]) == content
    by_oracle = oracle.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)
    said = [(message.channel, message.recipient, message.content[0].text) for message in by_oracle]
    expected = [("analysis", None, reasoning)] if reasoning else []
    if content or not (calls or reasoning):
        expected.append(("commentary" if calls else "final", None, content))
    assert said == expected + [("commentary", f"functions.{name}", arguments) for name, arguments in calls]


THINKING = "<|channel|>analysis<|message|>hm<|end|>"
FINAL = "<|channel|>final<|message|>Yes"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    "text",
    [
        f"{THINKING}<|start|>assistant{FINAL}<|return|>",
        f"{THINKING}<|start|>assistant{FINAL}<|end|>",
        f"{THINKING}<|start|>assistant{FINAL}",  # cut
        f"{THINKING}<|start|>assistant{FINAL}<|return|><|return|><|start|>assistant<|channel|>final<|message|>No",
        f"{THINKING}<|start|>assistant{FINAL}<|endoftext|>No",
        f"{THINKING}<|start|>assistant{FINAL}<|end|><|start|>user<|message|>And?<|end|>",  # goes on as the user
        f"<|start|>assistant{THINKING}<|start|><|start|>assistant{FINAL}",  # doubled <|start|>
        f"<|channel|>{THINKING}<|end|><|start|>assistant<|channel|>final<|message|><|message|>Yes<|return|>",
        f"<|channel|>analysis<|message|>{THINKING}<|start|>assistant{FINAL}",  # doubled header
        f"{THINKING}assistant{FINAL}",  # missing <|start|>
        f"{THINKING}{FINAL}",  # missing <|start|>assistant
        f"<|channel|>analysis<|message|>hm{FINAL}",  # missing <|end|>
        f"<|channel|>analysis<|message|>hm<|start|>assistant{FINAL}",
        f"{THINKING}Yes<|return|>",  # bare text
        f"{THINKING}<|start|>assistant Yes<|return|>",
        f"{THINKING}<|start|>assistant<|message|>Yes",  # no channel
        f"{THINKING}<|start|>assistant<|channel|>final Yes<|return|>",  # no <|message|>
        f"{THINKING}<|start|>assistant final<|message|>Yes",  # no <|channel|>
        f"{THINKING}<|start|>assistant<|channel|>answer<|message|>Yes",  # unknown channel
        f"{THINKING}<|start|>assistant<|channel|>commentary<|message|>Yes<|end|>",  # a preamble
        f"{THINKING}<|start|>assistant<|channel|>final to=user<|message|>Yes",  # a recipient that is no tool
        f"{THINKING}<|start|>assistant<|channel|>final <|constrain|>json<|message|>Yes",
        f"{THINKING}<|start|>assistant{FINAL}<|end|><|start|>assistant<|channel|>comment",  # truncated header
        f"{THINKING}<|start|>assistant{FINAL}<|end|><|start|>ass",
        f"{THINKING}<|start|>assistant{FINAL}<|end|><|start|>assistant to=functions.f<|channel|>",
    ],
)
def test_reasoning_and_an_answer(says: Callable[..., ParsedMessage], text: str) -> None:
    parsed = says(text)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("hm", "Yes", ())


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"{CALL}<|call|>",
        f"{CALL}<|return|>",
        f"{CALL}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>made up<|end|>",
        f"{CALL}<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>made up<|end|>",
        f"{CALL}<|call|>commentary{CALL}<|call|>",  # goes on past <|call|>
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",  # recipient before the channel
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        " to=functions.f <|constrain|>json<|message|>{}<|call|>",  # no channel
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",  # no format
        "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>",  # no namespace
        "<|channel|>commentary to=functions.functions.f<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|message|><|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json{}<|call|>",  # no <|message|>
        "<|channel|>commentary to=functions.f {}<|call|>",
        " to=functions.f {}<|call|>",
    ],
)
def test_a_call(says: Callable[..., ParsedMessage], text: str) -> None:
    parsed = says(text)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("", "", (ToolCall("call_0", "f", "{}"),))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", ""),
        ("Hello there", "Hello there"),
        ("final", "final"),
        ("to be", "to be"),
        (" to=5 is the answer", " to=5 is the answer"),
        ("assistants", "assistants"),
        ("Hello<|message|> there", "Hello there"),
        ("Hello<|constrain|> there<|return|>", "Hello there"),
        (f"Hello<|end|><|start|>assistant{FINAL}", "Hello\n\nYes"),
        ("<|channel|>The answer is 5<|end|>", "The answer is 5"),
        ("<|channel|>final The answer is 5", "The answer is 5"),
        ("<|end|><|end|><|return|>", ""),
        ("<|channel|><|message|>Hi", "Hi"),
        ("<|message|>Hi<|start|>assistant to=functions.f", "Hi"),
        ("<|reserved_200000|>Hi<|reserved_201088|> you<|startoftext|>", "Hi you"),
    ],
)
def test_whatever_else_is_content(says: Callable[..., ParsedMessage], text: str, content: str) -> None:
    parsed = says(text)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("", content, ())


def test_several_calls_behind_a_preamble(says: Callable[..., ParsedMessage]) -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|>"
    second = "<|channel|>commentary to=functions.g<|message|>[1]<|call|>"
    parsed = says(f"{preamble}<|start|>assistant{CALL}<|end|><|start|>assistant{second}")
    assert parsed.content == "I look."
    assert parsed.tool_calls == (ToolCall("call_0", "f", "{}"), ToolCall("call_1", "g", "[1]"))


def test_a_call_without_arguments(says: Callable[..., ParsedMessage]) -> None:
    called = (ToolCall("call_0", "f", ""),)
    assert says("<|channel|>commentary to=functions.f<|message|><|call|>").tool_calls == called
    assert says("<|channel|>commentary to=functions.f<|call|>").tool_calls == called
    assert says("<|channel|>commentary to=functions.f").tool_calls == ()  # the name may be cut


def test_parsing_ends_at_the_first_terminator(says: Callable[..., ParsedMessage]) -> None:
    assert says(f"{FINAL}<|return|> and more").num_tokens == 5
    assert says(f"{FINAL}<|return|> and more").terminator == "return"
    assert says(f"{CALL}<|call|> and more").terminator == "call"
    assert says(f"{FINAL}<|end|><|start|>user<|message|>").terminator == "turn"
    assert says(FINAL).terminator is None


def test_events_come_as_soon_as_they_can(o200k: Tokenizer, oracle: oh.HarmonyEncoding) -> None:
    ids = oracle.encode(f"{THINKING}<|start|>assistant{CALL}<|call|>", allowed_special="all")
    parser = HarmonyParser(o200k, call_id=lambda: "id")
    timed = [(index, event) for index, token in enumerate(ids) for event in parser.feed([token])]
    assert timed == [
        (3, ReasoningDelta("hm")),
        (4, MessageEnd("reasoning")),
        (len(ids) - 2, ToolCallBegin(0, "id", "f")),
        (len(ids) - 2, ToolCallDelta(0, "{}")),
        (len(ids) - 1, MessageEnd("tool_call")),
    ]
    assert parser.done


def test_stop_strings_are_looked_for_in_content_alone(says: Callable[..., ParsedMessage]) -> None:
    thinking = "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant"
    parsed = says(f"{thinking}{CALL}STOP<|end|><|start|>assistant{FINAL} or no STOP!", stop=["no", "STOP"])
    assert (parsed.reasoning, parsed.content, parsed.tool_calls[0].arguments) == ("STOP", "Yes or ", "{}STOP")
    assert (parsed.terminator, parsed.stop_string) == ("stop", "no")


def test_a_stop_string_across_tokens_is_stripped(byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.message, *b"a\xc3\xa9bcd"]
    parsed = parse(byte_tokenizer, ids, stop=["ébc"])
    assert (parsed.content, parsed.content_token_indices, parsed.num_tokens) == ("a", [1], 6)
    parsed = parse(byte_tokenizer, ids, stop=["ébc!"])
    assert (parsed.content, parsed.content_token_indices) == ("aébcd", [1, 2, 3, 4, 5, 6])


def test_what_is_held_back_is_shown_in_the_end(says: Callable[..., ParsedMessage], byte_tokenizer: Tokenizer) -> None:
    assert says(f"{FINAL} ST", stop=["STOP"]).content == "Yes ST"
    assert says(f"{FINAL} ST<|end|>OP", stop=["STOP"]).content == "Yes ST\n\nOP"
    assert parse(byte_tokenizer, [0xE6]).content == "\ufffd"
    parsed = parse(byte_tokenizer, [byte_tokenizer.message, 0xE6, byte_tokenizer.return_], stop=["\ufffd"])
    assert (parsed.content, parsed.terminator) == ("", "stop")


def test_bare_text_consists_of_all_its_tokens(byte_tokenizer: Tokenizer) -> None:
    parsed = parse(byte_tokenizer, "éa".encode())
    assert (parsed.content, parsed.content_token_indices) == ("éa", [0, 1, 2])


def test_a_character_cut_short_becomes_a_replacement(byte_tokenizer: Tokenizer) -> None:
    parsed = parse(byte_tokenizer, [byte_tokenizer.message, *b"a\xe6\x97", byte_tokenizer.return_])
    assert (parsed.content, parsed.content_token_indices) == ("a\ufffd", [1, 2, 3])
