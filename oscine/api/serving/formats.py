"""The form of what the model says: what a request asks for, and the grammar that enforces it.

A form comes from OpenAI's response_format, from the extensions of other servers, or from the schema of a function.
What no grammar can keep is refused with APIError.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import Struct

from oscine.api.common.connection import result_while_connected
from oscine.api.common.errors import APIError, invalid, unavailable, unsupported
from oscine.api.common.keys import NO_CALLER, Caller
from oscine.api.common.memory import memory_of
from oscine.api.common.work import run_in_thread
from oscine.api.serving.parameters import SamplingFields
from oscine.api.serving.sampling import check
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest, JsonSchema, ResponseFormat
from oscine.chat import grammar
from oscine.chat.grammar import (
    ChoiceFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    TextFormat,
    ToolChoice,
)
from oscine.chat.messages import FunctionTool, ResponseSchema
from oscine.chat.schemas.reduction import MAX_BYTES
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem
from oscine.system.grammar_sandbox.pool import TooManyGrammarsError, UndecidedError, sandbox
from oscine.system.json_text import decode_json

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_TYPES = ("text", "json_object", "json_schema")
_OBJECT = {"type": "object"}
_MAX_CHOICES = 8192
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_LONGEST_GBNF = 4096  # characters; converting them takes some 50 ms
_LONGEST_SCHEMA = 1 << 20  # characters of one that is given as text, with its spaces
_LONGEST_REASON = 200  # characters

_LONGEST = 500  # characters of a grammar's problem that a client is told
_MAX_RESULTS = 1024  # remembered, by the digest of a grammar
_PATIENCE_S = 30.0  # for a result: a few grammars that take the longest may be tried first

_EXCERPT = re.compile(r"\n +\d+ \| ")

T = TypeVar("T")
_Problem = tuple[int, str]  # index of the part, and what is wrong with it
_results: dict[bytes, _Problem | None] = {}


@dataclass(frozen=True, slots=True)
class Form:
    """What a text must be, and the parameter that says so."""

    format: TextFormat
    param: str
    about: str = "it"  # what an error calls the text's form


@dataclass(frozen=True, slots=True)
class Calls:
    """What may be called in a turn."""

    tools: tuple[FunctionTool, ...] = ()  # of the client
    choice: ToolChoice = "auto"  # `required`: calls alone; `none`: no calls
    parallel: bool = True  # several calls in one turn
    recipients: tuple[str, ...] = ()  # built-in tools as they are named after `to=`


NO_CALLS = Calls()


def asked_form(request: ChatCompletionRequest | CompletionRequest) -> Form | None:
    """Raises APIError that names the parameter for a value without meaning, or for two forms at once."""
    return only_form([*_of_response_format(request.response_format), *extensions(request)])


def only_form(found: Sequence[Form]) -> Form | None:
    """Raises APIError for a second one."""
    if len(found) > 1:
        raise invalid(found[1].param, f"the answer cannot take a second form beside that of '{found[0].param}'")
    return found[0] if found else None


def extensions(request: SamplingFields) -> Iterator[Form]:
    """The forms that the parameters of vLLM, SGLang and llama.cpp ask for."""
    yield from _given(request, _EXTENSIONS)
    asked, param = request.structured_outputs, "structured_outputs"
    if asked is None:
        return
    if asked.structural_tag is not None:
        raise unsupported(f"{param}.structural_tag")
    yield from _given(asked, _STRUCTURED, f"{param}.")
    if asked.json_object:
        yield Form(JsonFormat(_OBJECT), f"{param}.json_object")


def _given(record: Struct, makers: dict[str, Callable[[Any, str], Form]], where: str = "") -> Iterator[Form]:
    for name, make in makers.items():
        value = getattr(record, name)
        if value is not None:
            yield make(value, where + name)


def check_beside_calls(extended: Iterable[Form], choice: ToolChoice) -> None:
    """Raises APIError for a form by an extension if the turn has calls only, and so no answer to apply it to."""
    for form in extended if choice == "required" else ():
        raise invalid(form.param, "it applies to an answer, and 'tool_choice' asks for calls only")


def check_name(name: str, param: str) -> None:
    """Raises APIError for an invalid name of a format."""
    if not _NAME.fullmatch(name):
        raise invalid(param, f"{name[:80]!r} is not 1 to 64 letters, digits, underscores or hyphens")


def response_schema(response: ResponseFormat | None) -> ResponseSchema | None:
    """What the model is told of the form: enforced or not, it does better when it knows."""
    if response is None:
        return None
    if response.type == "json_object":
        return ResponseSchema("json_object", _OBJECT)
    if response.type != "json_schema":
        return None
    wanted = _json_schema(response)
    return ResponseSchema(wanted.name, wanted.schema or {}, wanted.description or "")


def _json_schema(response: ResponseFormat) -> JsonSchema:
    if response.json_schema is None:
        raise invalid("response_format.json_schema", "a format of type 'json_schema' needs it")
    check_name(response.json_schema.name, "response_format.json_schema.name")
    return response.json_schema


def _of_response_format(response: ResponseFormat | None) -> Iterator[Form]:
    if response is None or response.type == "text":
        return
    if response.type not in _TYPES:
        raise invalid("response_format.type", f"it must be one of {', '.join(_TYPES)}, not {response.type!r}")
    if response.enforce is False:
        return
    if response.type == "json_object":
        yield Form(JsonFormat(_OBJECT), "response_format")
    else:
        wanted = _json_schema(response)
        format = JsonFormat(wanted.schema or {}, wanted.strict is False, any_format=wanted.strict is not True)
        yield Form(format, "response_format.json_schema.schema")


def _json(schema: dict[str, Any] | str, param: str) -> Form:
    if isinstance(schema, str):
        check(len(schema) <= _LONGEST_SCHEMA, param, f"at most {_LONGEST_SCHEMA} characters", len(schema))
        try:
            memory_of(schema.encode("utf-8", "surrogatepass"))  # refuses too many values
            schema = decode_json(schema, dict[str, Any])
        except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
            raise invalid(param, f"it is no JSON schema: {error}") from None
    return Form(JsonFormat(schema, any_format=True), param)


def _regex(pattern: str, param: str) -> Form:
    if not pattern:
        raise invalid(param, "it is empty")
    _check_length(pattern, param)
    return Form(RegexFormat(pattern), param)


def _lark(grammar: str, param: str) -> Form:
    """The form for a grammar in Lark's syntax, or in GBNF, which llama.cpp and XGrammar read."""
    _check_length(grammar, param)
    if _GBNF.search(grammar):
        check(len(grammar) <= _LONGEST_GBNF, param, f"at most {_LONGEST_GBNF} characters in GBNF", len(grammar))
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter raises exactly this class, and RecursionError
            raise invalid(param, f"it is no GBNF: {str(error)[:_LONGEST_REASON]}") from None
    return Form(LarkFormat(grammar), param)


def _check_length(text: str, param: str) -> None:
    check(len(text) <= MAX_BYTES, param, f"at most {MAX_BYTES} characters", len(text))


def _choice(choices: list[str], param: str) -> Form:
    if not choices or not all(choices):
        raise invalid(param, "it must be a list of texts, none of them empty")
    check(len(choices) <= _MAX_CHOICES, param, f"at most {_MAX_CHOICES} texts", len(choices))
    return Form(ChoiceFormat(tuple(dict.fromkeys(choices))), param)


_EXTENSIONS: dict[str, Callable[[Any, str], Form]] = {
    **dict.fromkeys(("guided_json", "json_schema"), _json),
    **dict.fromkeys(("guided_regex", "regex"), _regex),
    "guided_choice": _choice,
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), _lark),
}
_STRUCTURED: dict[str, Callable[[Any, str], Form]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


async def constraint(
    form: Form | None = None, calls: Calls = NO_CALLS, caller: Caller = NO_CALLER, size: int = 0
) -> str | None:
    """The grammar for SamplingParams.grammar, for a prompt that ends in `<|start|>assistant`; None: nothing to enforce.

    `form`: of the final message. With `auto` only strict functions have their arguments constrained. With
    `required` all functions have, and there is no final message. For one named function, give it alone, with `required`
    and not `parallel`. `size`: bytes of the request.

    A continuation whose prompt ends within the final message takes `text_constraint` of the same form instead.
    Raises APIError 400 that names the parameter of what cannot be enforced.
    """
    tools, choice = calls.tools, calls.choice
    if choice == "required" and not (tools or calls.recipients):
        raise invalid("tool_choice", "a call is required, and there is no function to call")
    parts = [] if form is None or choice == "required" else [form]
    for tool in () if choice == "none" else tools:
        if tool.strict or choice == "required":
            about = (
                f"the schema of function {tool.name!r}" if tool.input is None else f"the grammar of tool {tool.name!r}"
            )
            parts.append(Form(grammar.arguments_format(tool), "tools", about))
    text, parallel, recipients = None if form is None else form.format, calls.parallel, calls.recipients
    make = partial(grammar.turn_grammar, text, tools, choice, parallel=parallel, other_recipients=recipients)
    whole = await _made(make, parts, caller, size)
    if whole is not None and parts:  # a grammar of names only can always be enforced
        await _check(whole, parts, caller, size)
    return whole


async def text_constraint(form: Form, caller: Caller = NO_CALLER, size: int = 0) -> str:
    """The grammar of text alone, up to the token that ends it: for raw text, or within a final message.

    `size`: bytes of the request. Raises APIError 400 that names the parameter.
    """
    whole = await _made(partial(grammar.text_grammar, form.format), [form], caller, size)
    await _check(whole, [form], caller, size)
    return whole


async def _made(make: Callable[[], T], parts: Sequence[Form], caller: Caller, size: int) -> T:
    try:
        return await run_in_thread(make, size, caller.threads)
    except (ValueError, RecursionError) as error:
        part = await run_in_thread(lambda: next(filter(_is_broken, parts), parts[0]), size)
        raise _refusal(part, _reason(error)) from None


def _is_broken(part: Form) -> bool:
    try:
        part.format.part()
    except (ValueError, RecursionError):
        return True
    return False


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


async def _check(whole: str, parts: Sequence[Form], caller: Caller, size: int) -> None:
    """Raises APIError for the first part that cannot be enforced."""
    digest = hashlib.sha256(whole.encode()).digest()
    if digest not in _results:
        result = await _checked(whole, parts, caller, size)
        if len(_results) >= _MAX_RESULTS:
            del _results[next(iter(_results))]
        _results[digest] = result
    if found := _results[digest]:
        raise _refusal(parts[found[0]], found[1])


async def _checked(whole: str, parts: Sequence[Form], caller: Caller, size: int) -> _Problem | None:
    """The first part with a problem. Parts may each be in order and still be too much together.

    Raises APIError if there is no result, and ClientLeftError if the client leaves first.
    """
    checks: list[GrammarCheck] = []
    for index, part in enumerate(parts):
        try:
            checks.append(await run_in_thread(partial(grammar.check_of, part.format), size, caller.threads))
        except ValueError as error:
            return index, str(error)
    found = await _tried([*checks, GrammarCheck(whole)], parts[0], caller)
    return None if found is None else (found.check % len(parts), _in_a_line(grammar.said(found.message)))


async def _tried(checks: list[GrammarCheck], part: Form, caller: Caller) -> Problem | None:
    """`part` is named by the error if no check ended."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            result = asyncio.wrap_future(sandbox().check(checks, caller.name or None))
            return await result_while_connected(caller.receive, result)
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
