"""Constraints on what the model may say: which grammar a request asks for, and what of it no grammar can keep.

Serves every endpoint: takes the records of oscine.chat, and refuses with APIError. Knows no request's wire format.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oscine.api.errors import invalid
from oscine.chat import grammar
from oscine.chat.grammar import TextFormat, ToolChoice
from oscine.chat.messages import FunctionTool

_LONGEST = 500  # characters of a grammar's problem that a client is told
_MOST_VERDICTS = 1024  # remembered, by the digest of a grammar

_EXCERPT = re.compile(r"\n +\d+ \| ")

_Problem = tuple[int, str]  # index of the part, and what is wrong with it
_verdicts: dict[bytes, _Problem | None] = {}


@dataclass(frozen=True, slots=True)
class _Part:
    """What is enforced, and what an error calls it."""

    format: TextFormat
    param: str
    about: str = "it"


async def constraint(
    text: TextFormat | None = None,
    tools: Sequence[FunctionTool] = (),
    tool_choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    other_recipients: Iterable[str] = (),
    text_param: str = "response_format",
    tools_param: str = "tools",
) -> str | None:
    """The grammar for SamplingParams.grammar, for a prompt that ends in `<|start|>assistant`; None: nothing to enforce.

    text: what the final message must be (JsonFormat, RegexFormat, ChoiceFormat or LarkFormat of oscine.chat.grammar).
    tools: the functions that may be called now; where one is named, that one alone, with `required` and not `parallel`.
    tool_choice: `auto` constrains the arguments of strict functions only; `required` those of all, and there is no
    final message then. parallel: whether a turn may hold several calls. other_recipients: built-in tools as they are
    named after `to=`, to be called freely.

    A continuation whose prompt ends within the final message takes `text_constraint` of the same text instead.
    Raises APIError 400 that names text_param or tools_param for what cannot be enforced.
    """
    others = tuple(other_recipients)
    if tool_choice == "required" and not (tools or others):
        raise invalid("tool_choice", "a call is required, and there is no function to call")
    parts = [] if text is None or tool_choice == "required" else [_Part(text, text_param)]
    for tool in () if tool_choice == "none" else tools:
        if tool.strict or tool_choice == "required":
            parts.append(_Part(grammar.arguments_format(tool), tools_param, f"the schema of function {tool.name!r}"))
    try:
        whole = grammar.turn_grammar(text, tools, tool_choice, parallel=parallel, other_recipients=others)
    except RecursionError:
        raise invalid(parts[0].param, "a schema is nested too deeply") from None
    except ValueError as error:
        raise invalid(parts[0].param, str(error)) from None
    if whole is not None:
        await _check(whole, parts)
    return whole


async def text_constraint(text: TextFormat, param: str) -> str:
    """The grammar of text alone, up to the token that ends it: for raw text, or within a final message.

    Raises APIError 400 that names `param`.
    """
    try:
        whole = grammar.text_grammar(text)
    except RecursionError:
        raise invalid(param, "the schema is nested too deeply") from None
    except ValueError as error:
        raise invalid(param, str(error)) from None
    await _check(whole, [_Part(text, param)])
    return whole


async def _check(whole: str, parts: Sequence[_Part]) -> None:
    """Raises APIError for the first part that cannot be enforced. Compiling takes milliseconds: not on this thread."""
    digest = hashlib.sha256(whole.encode()).digest()
    if digest not in _verdicts:
        verdict = await asyncio.to_thread(_judge, whole, parts)
        if len(_verdicts) >= _MOST_VERDICTS:
            del _verdicts[next(iter(_verdicts))]
        _verdicts[digest] = verdict
    found = _verdicts[digest]
    if found is not None:
        index, problem = found
        part = parts[index]
        raise invalid(part.param, f"{part.about} cannot be enforced: {problem}")


def _judge(whole: str, parts: Sequence[_Part]) -> _Problem | None:
    """The first part with a problem; all may be in order but too much together."""
    for i, part in enumerate(parts):
        problem = grammar.problem_of(part.format)
        if problem is not None:
            return i, _in_a_line(problem)
    problem = grammar.problem(whole)
    return None if problem is None else (0, _in_a_line(problem))


def _in_a_line(problem: str) -> str:
    """Without the excerpt of the grammar that llguidance appends."""
    return " ".join(_EXCERPT.split(problem)[0].split())[:_LONGEST].rstrip(".")
