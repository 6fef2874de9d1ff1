"""Random conversations and the same in the oracle's records, written independently of the renderer."""

from typing import Any

from hypothesis import strategies as st

from oscine.chat.messages import Conversation, FunctionTool, Message, ResponseSchema, ToolCall

texts = st.one_of(
    st.text(max_size=30), st.sampled_from(["<|end|>", "<|start|>assistant", "line\n\nline\r\n", "# Tools"])
)
lines = texts.map(lambda text: text.replace("\n", " "))  # the oracle lets others run out of their comment
words = st.text(alphabet="abcdefgh", min_size=1, max_size=6)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True)

scalars = st.sampled_from([None, True, False, 0, 7, -12, 0.5]) | words
defaults = scalars | st.lists(scalars, max_size=2) | st.dictionaries(words, scalars, max_size=2)


def _optional(base: dict[str, Any], **extra: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({key: st.just(value) for key, value in base.items()}, optional=extra)


def _typed() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        _optional({"type": "string"}, enum=st.lists(words, max_size=3)),
        st.sampled_from([{"type": name} for name in ("string", "number", "integer", "boolean", "array", "unheard")]),
        st.just({}),
        st.lists(st.sampled_from(["string", "integer", "null", "array", "object"]), min_size=1, max_size=3).map(
            lambda kinds: {"type": kinds}
        ),
    )


def _with(strategy: st.SearchStrategy[dict[str, Any]], **extra: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda base, more: base | more, strategy, _optional({}, **extra))


def _told_apart(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the description of the first variant, where the oracle drops that or the property's own."""
    if "oneOf" not in schema or "description" not in schema:
        return schema
    first, *others = schema["oneOf"]
    return schema | {"oneOf": [{key: value for key, value in first.items() if key != "description"}, *others]}


def _compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    variants = st.lists(_with(inner, description=lines, default=defaults), min_size=1, max_size=3)
    properties = st.dictionaries(
        words,
        _with(inner, title=words, description=lines, default=defaults, examples=st.lists(words, max_size=2)).map(
            _told_apart
        ),
        max_size=4,
    )
    return st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        variants.map(lambda of: {"oneOf": of}),
        st.builds(
            lambda props, take, extra: (
                {
                    "type": "object",
                    "properties": props,
                    "required": [key for key, taken in zip(props, take, strict=False) if taken],
                }
                | extra
            ),
            properties,
            st.lists(st.booleans(), min_size=4, max_size=4),
            _optional({}, description=lines, additionalProperties=st.just(False)),
        ),
    )


# Every schema here is one of which the oracle drops nothing.
schemas = st.recursive(_typed(), _compound, max_leaves=8)
function_tools = st.builds(FunctionTool, name=names, description=texts, parameters=st.none() | _compound(schemas))
tool_lists = st.lists(function_tools, max_size=3, unique_by=lambda tool: tool.name).map(tuple)


@st.composite
def _turns(draw: st.DrawFn) -> list[Message]:
    """A question, perhaps rounds of calls and results, and perhaps an answer."""
    messages = [Message("user", draw(texts))]
    for _ in range(draw(st.integers(0, 2))):
        call_names = draw(st.lists(names, min_size=1, max_size=2))
        calls = tuple(ToolCall(f"call_{i}", name, draw(texts)) for i, name in enumerate(call_names))
        messages.append(Message("assistant", draw(texts), draw(st.none() | texts), calls))
        messages += [Message("tool", draw(texts), tool_call_id=call.id) for call in calls]
    if draw(st.booleans()):
        messages.append(Message("assistant", draw(texts), draw(st.none() | texts)))
    if draw(st.integers(0, 5)) == 0:
        messages.append(Message("developer", draw(texts)))
    return messages


@st.composite
def conversations(draw: st.DrawFn, max_turns: int = 3, formats: bool = True) -> Conversation:
    roles = st.sampled_from(["system", "developer"])
    leading = [Message(draw(roles), draw(texts)) for _ in range(draw(st.integers(0, 2)))]
    turns = [message for _ in range(draw(st.integers(0, max_turns))) for message in draw(_turns())]
    response = st.none() | st.builds(ResponseSchema, name=names, schema=schemas, description=words | st.just(""))
    tools = draw(tool_lists)
    return Conversation(
        messages=(*leading, *turns),
        tools=tools,
        response_schema=None if tools or not formats else draw(response),  # the oracle cannot express both
        reasoning_effort=draw(st.sampled_from(["low", "medium", "high"])),
        current_date=draw(st.sampled_from(["", "2025-08-05"])),
    )
