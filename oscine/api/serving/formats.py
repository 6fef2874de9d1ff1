"""Constraints on what the model may say: which grammar a request asks for, and what of it no grammar can keep.

Serves every endpoint: takes the records of oscine.chat, and refuses with APIError. Knows no request's wire format.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence

from oscine.api.http.connection import result_while_connected
from oscine.api.http.errors import APIError, invalid, unavailable
from oscine.api.http.keys import NO_CALLER, Caller
from oscine.api.serving.text_format import Form
from oscine.chat import grammar
from oscine.chat.grammar import ToolChoice
from oscine.chat.messages import FunctionTool
from oscine.judges.pool import TooManyGrammarsError, UndecidedError, judges
from oscine.judges.trial import Problem, Trial

_LONGEST = 500  # characters of a grammar's problem that a client is told
_MOST_VERDICTS = 1024  # remembered, by the digest of a grammar
_PATIENCE_S = 30.0  # for a verdict: a few grammars that take the longest may be tried first

_EXCERPT = re.compile(r"\n +\d+ \| ")

_Problem = tuple[int, str]  # index of the part, and what is wrong with it
_verdicts: dict[bytes, _Problem | None] = {}


async def constraint(
    form: Form | None = None,
    tools: Sequence[FunctionTool] = (),
    tool_choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    other_recipients: Iterable[str] = (),
    caller: Caller = NO_CALLER,
) -> str | None:
    """The grammar for SamplingParams.grammar, for a prompt that ends in `<|start|>assistant`; None: nothing to enforce.

    form: what the final message must be. tools: the functions that may be called now. Where one is named, give that one
    alone, with `required` and not `parallel`. tool_choice: `auto` constrains the arguments of strict functions only;
    `required` those of all, and there is no final message then. parallel: whether a turn may hold several calls.
    other_recipients: built-in tools as they are named after `to=`, to be called freely.

    A continuation whose prompt ends within the final message takes `text_constraint` of the same form instead.
    Raises APIError 400 that names the parameter of what cannot be enforced.
    """
    others = tuple(other_recipients)
    if tool_choice == "required" and not (tools or others):
        raise invalid("tool_choice", "a call is required, and there is no function to call")
    parts = [] if form is None or tool_choice == "required" else [form]
    for tool in () if tool_choice == "none" else tools:
        if tool.strict or tool_choice == "required":
            parts.append(Form(grammar.arguments_format(tool), "tools", f"the schema of function {tool.name!r}"))
    text = None if form is None else form.format
    try:
        whole = await beside(
            lambda: grammar.turn_grammar(text, tools, tool_choice, parallel=parallel, other_recipients=others), size
        )
    except RecursionError:
        raise invalid(parts[0].param, "a schema is nested too deeply") from None
    except ValueError as error:
        raise invalid(parts[0].param, str(error)) from None
    if whole is not None and parts:  # a grammar of names only can always be enforced
        await _check(whole, parts, caller)
    return whole


async def text_constraint(form: Form, caller: Caller = NO_CALLER) -> str:
    """The grammar of text alone, up to the token that ends it: for raw text, or within a final message.

    Raises APIError 400 that names the parameter.
    """
    try:
        whole = grammar.text_grammar(form.format)
    except RecursionError:
        raise invalid(form.param, "the schema is nested too deeply") from None
    except ValueError as error:
        raise invalid(form.param, str(error)) from None
    await _check(whole, [form], caller)
    return whole


async def _check(whole: str, parts: Sequence[Form], caller: Caller) -> None:
    """Raises APIError for the first part that cannot be enforced."""
    digest = hashlib.sha256(whole.encode()).digest()
    if digest not in _verdicts:
        verdict = await _judged(whole, parts, caller)
        if len(_verdicts) >= _MOST_VERDICTS:
            del _verdicts[next(iter(_verdicts))]
        _verdicts[digest] = verdict
    found = _verdicts[digest]
    if found is not None:
        index, problem = found
        raise _refusal(parts[index], problem)


async def _judged(whole: str, parts: Sequence[Form], caller: Caller) -> _Problem | None:
    """The first part with a problem. Parts may each be in order and still be too much together.

    Raises APIError if there is no verdict, and ClientDisconnect if the client leaves first.
    """
    trials: list[Trial] = []
    origins: list[int] = []  # index of the part of each trial
    for index, part in enumerate(parts):
        try:
            of_part = await beside(partial(grammar.trials_of, part.format), size)
        except ValueError as error:
            return index, str(error)
        trials += of_part
        origins += [index] * len(of_part)
    found = await _tried([*trials, Trial(whole)], parts[0], caller)
    return None if found is None else ([*origins, 0][found.trial], _in_a_line(grammar.said(found.message)))


async def _tried(trials: list[Trial], part: Form, caller: Caller) -> Problem | None:
    """`part` is named by the error if no trial ended."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            verdict = asyncio.wrap_future(judges().judge(trials, caller.name or None))
            return await result_while_connected(caller.receive, verdict)
    except UndecidedError as error:
        raise _refusal(part, str(error)) from None
    except TooManyGrammarsError:
        raise _overloaded("Too many schemas and grammars of one API key wait to be compiled.") from None
    except (TimeoutError, OSError):
        raise _overloaded("The server has too many schemas and grammars to compile.") from None


def _overloaded(message: str) -> APIError:
    return unavailable(message, code="overloaded", retry_after_s=_PATIENCE_S)


def _refusal(part: Form, problem: str) -> APIError:
    return invalid(part.param, f"{part.about} cannot be enforced: {problem}")


def _in_a_line(problem: str) -> str:
    """Without the excerpt of the grammar that llguidance appends."""
    return " ".join(_EXCERPT.split(problem)[0].split())[:_LONGEST].rstrip(".")
