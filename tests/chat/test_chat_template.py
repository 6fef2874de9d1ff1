"""The Jinja template of the embedded model renders the same prompts as the Python renderer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from jinja2 import nodes

import oscine.model
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation, FunctionTool, Message
from oscine.chat.tokenizer import Tokenizer

from .strategies import conversations
from .test_harmony import unique_call_ids
from .test_typescript import NOTHING_LOST, REFERRING

TEMPLATE = (Path(oscine.model.__file__).parent / "nano" / "chat_template.jinja").read_text()
MINIJINJA = {"get", "isalnum", "items", "replace", "rstrip", "split", "splitlines", "strip"}  # some of its methods


def wire(message: Message) -> dict[str, Any]:
    """The message as the API has it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        fields["thinking"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def wire_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description}
    return {
        "type": "function",
        "function": function | ({"parameters": tool.parameters} if tool.parameters is not None else {}),
    }


def templated(conversation: Conversation, **variables: Any) -> str:
    """What transformers' apply_chat_template makes of it."""
    from transformers.utils.chat_template_utils import render_jinja_template  # not in each process that collects tests

    texts, _ = render_jinja_template(
        conversations=[[wire(message) for message in conversation.messages]],
        tools=[wire_tool(tool) for tool in conversation.tools] or None,
        chat_template=TEMPLATE,
        reasoning_effort=conversation.reasoning_effort,
        current_date=conversation.current_date,
        **({"add_generation_prompt": True} | variables),
    )
    text: str = texts[0]
    return text


@pytest.fixture(scope="session")
def rendered(renderer: HarmonyRenderer, o200k: Tokenizer) -> Callable[[Conversation], str]:
    return lambda conversation: o200k.decode(renderer.render(conversation))


@pytest.mark.long
@settings(max_examples=50)
@given(conversations(formats=False))
def test_the_template_says_what_the_renderer_says(
    rendered: Callable[[Conversation], str], conversation: Conversation
) -> None:
    conversation = unique_call_ids(conversation)
    assert templated(conversation) == rendered(conversation)


@pytest.mark.long
def test_the_template_loses_nothing_either(rendered: Callable[[Conversation], str]) -> None:
    each = {f"p{i}": schema for i, (schema, _) in enumerate(NOTHING_LOST)}
    tools = (FunctionTool("f", "All.", {"type": "object", "properties": each}), FunctionTool("g", "", REFERRING))
    conversation = Conversation((Message("user", "q"),), tools)
    assert templated(conversation) == rendered(conversation)


@pytest.mark.long
def test_variables_of_the_template(rendered: Callable[[Conversation], str]) -> None:
    conversation = Conversation((Message("user", "q"),))
    with_prompt = rendered(conversation)
    assert templated(conversation, add_generation_prompt=False) == with_prompt.removesuffix("<|start|>assistant")
    named = templated(conversation, model_identity="You are a wren.", knowledge_cutoff="2025-01")
    assert "<|message|>You are a wren.\nKnowledge cutoff: 2025-01\n\nReasoning: medium" in named


def test_a_result_without_its_call_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateError, match="x9"):
        templated(Conversation((Message("tool", "rain", tool_call_id="x9"),)))


def test_the_template_needs_no_method_that_dynamos_frontend_lacks() -> None:
    """Others may be called where the engine has them, as `is defined` tells."""
    tree = jinja2.Environment().parse(TEMPLATE)
    called = {call.node.attr for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)}
    defined = [test.node for test in tree.find_all(nodes.Test) if test.name == "defined"]
    asked = {node.attr for node in defined if isinstance(node, nodes.Getattr)}
    assert called - asked <= MINIJINJA
