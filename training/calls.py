"""Function calling: the right function, its arguments, and an answer from its result."""

import json
from dataclasses import replace

from oscine.chat.messages import FunctionTool, Message, ToolCall
from training import words
from training.episode import Effort, Episode
from training.function_kinds import KINDS, UNRELATED, Kind, Value
from training.functions import Function, make_function
from training.split import Draw

_SKIES = ("sunny", "cloudy", "rain", "snow", "clear", "fog", "windy")
_STATES = ("ok", "done", "sent", "created", "booked", "failed", "pending", "confirmed", "saved", "shipped", "lost")


def call(draw: Draw, effort: Effort) -> Episode:
    """One question that needs one of one to five functions, sometimes twice."""
    function = make_function(draw)
    tools = offered(draw, function)
    kind = draw.rng.random()
    if kind < 0.18:
        return (_two_calls if kind < 0.1 else _asked_again)(draw, effort, function, tools)
    messages = [Message("user", function.question), *_call(draw, effort, function, function.arguments)]
    return Episode("tool call", (*messages, _answer(effort, [messages[-1]])), tools=tools)


def offered(draw: Draw, function: Function, kinds: tuple[Kind, ...] = KINDS) -> tuple[FunctionTool, ...]:
    """The function among others of different purpose, in random order."""
    functions = {function.purpose: function}
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3, 4))):
        other = make_function(draw, kinds)
        if all(other.tool.name != known.tool.name for known in functions.values()):
            functions.setdefault(other.purpose, other)
    tools = [known.tool for known in functions.values()]
    return tuple(draw.several(tools, len(tools), len(tools)))


def _two_calls(draw: Draw, effort: Effort, function: Function, tools: tuple[FunctionTool, ...]) -> Episode:
    """The same function for two cities or people, one call after the other."""
    key = _named(function)
    if key is None:
        return call(draw, effort)
    first, second = str(function.arguments[key]), _another(draw)
    question = function.question.replace(first, f"{first} and {second}", 1)
    messages = [Message("user", question), *_call(draw, effort, function, function.arguments)]
    messages += _call(draw, effort, function, {**function.arguments, key: second}, again=True)
    return Episode("two tool calls", (*messages, _answer(effort, [messages[2], messages[4]])), tools=tools)


def _asked_again(draw: Draw, effort: Effort, function: Function, tools: tuple[FunctionTool, ...]) -> Episode:
    """An answered question, then the same for another city or person in a few words."""
    key = _named(function)
    if key is None:
        return call(draw, effort)
    first = [Message("user", function.question), *_call(draw, effort, function, function.arguments)]
    first.append(_answer(effort, [first[-1]]))
    second = _another(draw)
    forms = (
        "And {}?",
        "What about {}?",
        "and {}",
        "How about {}?",
        "Now {}.",
        "The same for {}, please.",
        "And for {}?",
    )
    question = Message("user", draw.choice(forms).format(second))
    messages = [*first, question, *_call(draw, effort, function, {**function.arguments, key: second})]
    return Episode("tool call again", (*messages, _answer(effort, [messages[-1]])), tools=tools)


def _named(function: Function) -> str | None:
    """The parameter with a name as its value that occurs once in the question."""
    for key, value in function.arguments.items():
        if isinstance(value, str) and value[0].isupper() and function.question.count(value) == 1:
            return key
    return None


def _another(draw: Draw) -> str:
    return words.city(draw) if draw.chance(0.6) else words.first_name(draw)


def _call(
    draw: Draw, effort: Effort, function: Function, arguments: dict[str, Value], again: bool = False
) -> list[Message]:
    """The assistant's call and the result that the function gives."""
    name = function.tool.name
    text = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    made = ToolCall(f"call_{draw.integer(0, 1 << 30):x}", name, text)
    asked = Message("assistant", reasoning=_thought(effort, function.tool, arguments, again), tool_calls=(made,))
    result = json.dumps({key: _result(draw, key) for key in function.results}, separators=_separators(draw))
    if draw.chance(0.2):
        result = draw.choice((words.phrase(draw), str(draw.integer(0, 999)), draw.choice(_STATES), draw.choice(_SKIES)))
    return [asked, Message("tool", result, tool_call_id=made.id)]


def _separators(draw: Draw) -> tuple[str, str]:
    return draw.choice(((", ", ": "), (",", ":")))


def _result(draw: Draw, key: str) -> Value:
    if key in ("status", "state"):
        return draw.choice(_STATES)
    if key in ("sky", "best", "song", "translation"):
        return draw.choice(_SKIES) if key == "sky" else words.phrase(draw)
    if key in ("time", "departure"):
        return words.clock_time(draw)
    if key in ("zone", "code", "email"):
        return words.letters_and_digits(draw, draw.integer(3, 8))
    if key == "city":
        return words.city(draw)
    if key in ("price", "total", "rate", "result") and draw.chance(0.5):
        return draw.integer(0, 999) + draw.choice((0.5, 0.25, 0.99, 0.1))
    return draw.integer(-5, 35) if key == "temperature" else draw.integer(0, 99999)


def _thought(effort: Effort, tool: FunctionTool, arguments: dict[str, Value], again: bool) -> str | None:
    if effort == "low":
        return None
    listed = ", ".join(f"{key}: {_plain(made)}" for key, made in arguments.items())
    thought = f"{'Next' if again else 'I call'} {tool.name}. {listed}."
    if effort == "medium" or again:
        return thought
    assert tool.parameters is not None
    return f"The user needs a function. {thought} Required: {', '.join(tool.parameters['required'])}."


def _plain(made: Value) -> str:
    return ("yes" if made else "no") if isinstance(made, bool) else str(made)


def _answer(effort: Effort, results: list[Message]) -> Message:
    said = " ".join(_sentence(message.content) for message in results)
    return Message("assistant", said, reasoning="The result is there, so I can answer." if effort == "high" else None)


def _sentence(result: str) -> str:
    """`{"sky": "clear", "wind": 3}` becomes `The sky is clear and the wind is 3.`"""
    if not result.startswith("{"):
        return f"The result is {result}."
    parts = [f"the {key.replace('_', ' ')} is {_plain(made)}" for key, made in json.loads(result).items()]
    text = words.join(parts)
    return f"{text[0].upper()}{text[1:]}."


def no_call(draw: Draw, episode: Episode) -> Episode:
    """The same episode, with declared functions that it does not need."""
    return replace(episode, tools=offered(draw, make_function(draw, UNRELATED), UNRELATED))
