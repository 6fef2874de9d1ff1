"""Calls that only carry data: the function is a class of a client, for structured answers, filled from a text.

Also calls that the server forces although the conversation does not ask for them.
"""

import json
from dataclasses import replace
from typing import Any

from oscine.chat.messages import FunctionTool, Message, ToolCall
from training import words
from training.calls import offered
from training.chitchat import identity, refusal
from training.episode import Effort, Episode
from training.fields import Schema
from training.functions import make_function
from training.oddities import odd
from training.records import Record, empty, listing, record
from training.split import Draw
from training.sums import arithmetic

_ASKS = (
    "{t}",
    "{t}",
    "Extract: {t}",
    "Extract {t}",
    "extract {t}",
    "Extract the data: {t}",
    "Extract the {k} from this text: {t}",
    "Extract the {k} information from the following text:\n\n{t}",
    "Please extract the details from the following text: {t}",
    "Extract all facts from the text below.\n\n{t}",
    "{t} Extract the data.",
    "Get the details of this {k}: {t}",
    "Who or what is this about? {t}",
    "Parse this text:\n{t}",
    "Text: {t}",
    "<text>{t}</text>",
    'What does this say about the {k}? "{t}"',
    "Add this {k}: {t}",
    "Save the following {k}. {t}",
    "Create a {k} from this: {t}",
    "Structure this: {t}",
    "Here is some text.\n\n{t}\n\nExtract what you need.",
    "Use {f}. {t}",
    "Call {f} for this text: {t}",
    "Fill in {f}: {t}",
)
INSTRUCTIONS = (
    *("",) * 8,
    "Extract the information.",
    "You extract data from text.",
    "You are an expert extraction algorithm. Only extract relevant information from the text.",
    "You are a world class algorithm for extracting information in structured formats.",
    "Extract the requested fields.",
    "Use the given tool to answer.",
    "You are a helpful assistant that extracts data.",
)
_DESCRIPTIONS = (
    "Correctly extracted `{n}` with all the required parameters with correct types",
    "Correctly extracted `{n}` with all the required parameters with correct types",
    "The final response which ends this conversation",
    "{n}",
    "",
    "",
    "Information about a {k}.",
    "Records the {k}.",
    "Extracted {k}.",
    "Respond with this when the answer is known.",
)


def extraction_call(draw: Draw, effort: Effort) -> Episode:
    """A call whose arguments are the facts of a text, or the result of a sum."""
    if draw.chance(0.1):
        return _sum_call(draw, effort)
    made = record(draw)
    tool = class_tool(draw, made)
    question = draw.choice(_ASKS).format(t=made.text, k=made.about, f=tool.name)
    return _called(draw, effort, question, tool, made.answer, listing(made))


def class_tool(draw: Draw, made: Record) -> FunctionTool:
    """The class as a function."""
    kind = draw.rng.random()
    tool_name = "final_result" if kind < 0.1 else draw.make("function", lambda: _name(draw, made, kind < 0.75))
    description = draw.choice(_DESCRIPTIONS).format(n=made.name, k=made.about)
    return FunctionTool(tool_name, description, made.schema)


def _name(draw: Draw, made: Record, plain: bool) -> str:
    """The name of the class, or of a function that takes it."""
    if plain:
        end = words.made_up(draw).capitalize() if draw.chance(0.2) else draw.choice(("", "", "", "Model", "Schema"))
        return made.name + end
    snake = f"{made.name.lower()}{draw.choice(('', '', '_tool', '_' + words.made_up(draw)))}"
    forms = (f"extract_{snake}", f"get_{snake}_info", f"record_{snake}", f"save_{snake}", f"{snake}_data", snake)
    return draw.choice(forms)


def beside_classes(draw: Draw, episode: Episode) -> Episode:
    """The same episode, with declared classes for which it has no facts."""
    tools: dict[str, FunctionTool] = {}
    for _ in range(draw.choice((1, 1, 2, 3))):
        tool = class_tool(draw, record(draw)) if draw.chance(0.7) else make_function(draw).tool
        tools.setdefault(tool.name, _bare(tool) if draw.chance(0.3) else tool)
    return replace(episode, tools=tuple(tools.values()))


def _bare(tool: FunctionTool) -> FunctionTool:
    """Without a description, and enums without their type, as some clients write them."""
    assert tool.parameters is not None
    properties = {
        key: {"enum": schema["enum"]} if "enum" in schema else schema
        for key, schema in tool.parameters["properties"].items()
    }
    return replace(tool, description="", parameters={**tool.parameters, "properties": properties})


def forced_call(draw: Draw, effort: Effort) -> Episode:
    """A call that the grammar forces although the message has no facts for it: its arguments are empty, and end. The
    tokens before them are those that the model would write without the grammar. They are not learnt.
    """
    asked = draw.choice((refusal, refusal, odd, identity))(draw, effort)
    tool = class_tool(draw, record(draw)) if draw.chance(0.6) else make_function(draw).tool
    assert tool.parameters is not None
    question, final = asked.messages
    call = _call(draw, tool.name, empty(tool.parameters))
    forced = Message("assistant", reasoning=final.reasoning, tool_calls=(call,))
    return Episode("forced call", (question, forced), (tool,), forced=True)


def _sum_call(draw: Draw, effort: Effort) -> Episode:
    asked = arithmetic(draw, effort, draw.choice("+-"), 3)
    question, final = asked.messages
    key = draw.choice(("answer", "result", "value", "total", "sum", "number"))
    properties: Schema = {key: {"type": draw.choice(("integer", "integer", "number"))}}
    answer: dict[str, Any] = {key: asked.number}
    if draw.chance(0.3):
        why = draw.choice(("reasoning", "explanation", "chain_of_thought", "equation", "steps"))
        properties = {why: {"type": "string"}, **properties}
        answer = {why: final.content, **answer}
    schema: Schema = {"type": "object", "properties": properties, "required": list(properties)}
    name = draw.choice(("Answer", "Result", "MathAnswer", "Calculation", "Sum", "Response", "Output"))
    tool = class_tool(draw, Record(name, "result", question.content, schema, answer))
    return _called(draw, effort, question.content, tool, answer, "", final.reasoning)


def _called(
    draw: Draw,
    effort: Effort,
    question: str,
    tool: FunctionTool,
    answer: dict[str, Any],
    listed: str,
    reasoning: str | None = None,
) -> Episode:
    thought = reasoning if reasoning and effort != "low" else None
    if effort != "low" and not reasoning:
        thought = f"I call {tool.name}. {listed}."
        if effort == "high":
            assert tool.parameters is not None
            thought = f"The user needs a function. {thought} Required: {', '.join(tool.parameters['required'])}."
    tools = _beside(draw, tool) if draw.chance(0.25) else (tool,)
    call = Message("assistant", reasoning=thought, tool_calls=(_call(draw, tool.name, answer),))
    instructions = draw.choice(INSTRUCTIONS)
    return Episode("extraction call", (Message("user", question), call), tools, instructions=instructions)


def _beside(draw: Draw, tool: FunctionTool) -> tuple[FunctionTool, ...]:
    """The class among ordinary functions."""
    others = [other for other in offered(draw, make_function(draw)) if other.name != tool.name]
    tools = [tool, *others[:3]]
    return tuple(draw.several(tools, len(tools), len(tools)))


def _call(draw: Draw, name: str, arguments: dict[str, Any]) -> ToolCall:
    text = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    return ToolCall(f"call_{draw.integer(0, 1 << 30):x}", name, text)
