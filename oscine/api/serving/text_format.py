"""The form that a request asks of its answer: OpenAI's response_format, and the extensions of other servers.

This module checks which of them go together. What a grammar can enforce is checked in formats.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from oscine.api.http.body import check_values
from oscine.api.http.errors import invalid, unsupported
from oscine.api.serving.parameters import SamplingFields
from oscine.api.serving.sampling import check
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest, JsonSchema, ResponseFormat
from oscine.chat.grammar import (
    MOST_BYTES,
    ChoiceFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    TextFormat,
    ToolChoice,
)
from oscine.chat.messages import ResponseSchema

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_TYPES = ("text", "json_object", "json_schema")
_OBJECT = {"type": "object"}
_MOST_CHOICES = 8192
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_LONGEST_GBNF = 4096  # characters; converting them takes some 50 ms
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True, slots=True)
class Form:
    """What a text must be, and the parameter that says so."""

    format: TextFormat
    param: str
    about: str = "it"  # what an error calls the text's form


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
    yield from _guided(request)
    yield from _structured_outputs(request)


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
        format = JsonFormat(wanted.schema or {}, lenient=wanted.strict is False)
        yield Form(format, "response_format.json_schema.schema")


def _guided(request: SamplingFields) -> Iterator[Form]:
    for param in ("guided_json", "json_schema"):
        if (schema := getattr(request, param)) is not None:
            yield _json(schema, param)
    for param in ("guided_regex", "regex"):
        if (pattern := getattr(request, param)) is not None:
            yield _regex(pattern, param)
    if request.guided_choice is not None:
        yield _choice(request.guided_choice, "guided_choice")
    for param in ("guided_grammar", "ebnf", "grammar"):
        if (grammar := getattr(request, param)) is not None:
            yield _lark(grammar, param)


def _structured_outputs(request: SamplingFields) -> Iterator[Form]:
    asked, param = request.structured_outputs, "structured_outputs"
    if asked is None:
        return
    if asked.structural_tag is not None:
        raise unsupported(f"{param}.structural_tag")
    if asked.json is not None:
        yield _json(asked.json, f"{param}.json")
    if asked.regex is not None:
        yield _regex(asked.regex, f"{param}.regex")
    if asked.choice is not None:
        yield _choice(asked.choice, f"{param}.choice")
    if asked.grammar is not None:
        yield _lark(asked.grammar, f"{param}.grammar")
    if asked.json_object:
        yield Form(JsonFormat(_OBJECT), f"{param}.json_object")


def _json(schema: dict[str, Any] | str, param: str) -> Form:
    if isinstance(schema, str):
        try:
            check_values(schema.encode("utf-8", "surrogatepass"))
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
            raise invalid(param, f"it is no JSON schema: {error}") from None
    return Form(JsonFormat(schema), param)


def _regex(pattern: str, param: str) -> Form:
    if not pattern:
        raise invalid(param, "it is empty")
    _check_length(pattern, param)
    return Form(RegexFormat(pattern), param)


def _lark(grammar: str, param: str) -> Form:
    """The form for a grammar in Lark's syntax, or in GBNF, which llama.cpp and XGrammar read."""
    if _GBNF.search(grammar):
        check(len(grammar) <= _LONGEST_GBNF, param, f"at most {_LONGEST_GBNF} characters in GBNF", len(grammar))
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter raises exactly this class, and RecursionError
            raise invalid(param, f"it is no GBNF: {str(error)[:_LONGEST_REASON]}") from None
    _check_length(grammar, param)
    return Form(LarkFormat(grammar), param)


def _check_length(text: str, param: str) -> None:
    check(len(text) <= MOST_BYTES, param, f"at most {MOST_BYTES} characters", len(text))


def _choice(choices: list[str], param: str) -> Form:
    if not choices or not all(choices):
        raise invalid(param, "it must be a list of texts, none of them empty")
    check(len(choices) <= _MOST_CHOICES, param, f"at most {_MOST_CHOICES} texts", len(choices))
    return Form(ChoiceFormat(tuple(dict.fromkeys(choices))), param)
