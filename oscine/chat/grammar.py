"""The grammar of a turn for llguidance: harmony's envelope, and inside it the form that a request asks for.

Only the final message and the arguments of calls are constrained. Reasoning is free text and may be left out. It is one
message, as gpt-oss writes it: a weak model would repeat it until its budget ends. This module spells headers strictly;
header.py reads them tolerantly.

A grammar is JSON: {"grammars": [envelope, parts...]}, where the envelope refers to each part by its name.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
from llguidance import regex_to_lark

from oscine.chat.messages import FunctionTool
from oscine.chat.schemas.reduction import MAX_BYTES, TOO_LARGE, reduced
from oscine.chat.tools import NAMESPACE
from oscine.system.grammar_sandbox.check import GrammarCheck

_WHITESPACE = (
    r"[\x20\x0A\x0D\x09]{1,20}"  # at each place where JSON allows space: a weak model cannot fill its budget with it
)
_SENTENCES = (
    ("NoExtensionBias", "it refers to itself and says nothing else, so no text satisfies it"),
    (
        "oneOf constraints are not supported",
        "the schemas of a 'oneOf' overlap, and what only one of them admits cannot be told apart; use 'anyOf'",
    ),
    ("Regex is empty", "a text's pattern, format and lengths exclude each other, so no text satisfies them"),
    ("if regex is empty", "a text's pattern, format and lengths are too complex together"),
    ("can't determine if patternProperty", "its 'patternProperties' are too complex to tell apart"),
    (
        "min/maxProperties only supported",
        "'minProperties' and 'maxProperties' can be enforced only where all listed properties are required",
    ),
    ("Failed to generate regex for", "a number's limits are beyond what a grammar can count"),
    ("circular references with sibling keys", "a '$ref' within its own target has other keywords beside it"),
    ("recursion limit exceeded", "it is nested too deeply"),
)

_PRIORITY = re.compile(r"^([?!]?\w+)\.-?\d+[ \t]*:", re.MULTILINE)  # of a rule in Lark: it changes no text
_MAX_HEADERS = 64  # cached grammars of headers: most requests have no tools, or the same tools as an earlier one

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """JSON that a schema admits, properties in the order of the schema."""

    schema: dict[str, Any]
    lenient: bool = False  # keywords that no grammar can enforce are skipped instead of refused
    any_format: bool = False  # so are formats that no grammar knows

    def part(self) -> dict[str, Any]:
        """Raises ValueError for what cannot be enforced."""
        if len(msgspec.json.encode(self.schema)) > MAX_BYTES:
            raise ValueError(TOO_LARGE)
        schema = reduced(self.schema, lenient=self.lenient, any_format=self.any_format)
        options = {"whitespace_pattern": _WHITESPACE, "lenient": self.lenient}
        return {"json_schema": {**schema, "x-guidance": options}}


@dataclass(frozen=True, slots=True)
class RegexFormat:
    """Text that a regular expression matches from its start to its end."""

    pattern: str

    def part(self) -> dict[str, Any]:
        return {"lark_grammar": f"start: /{regex_to_lark(self.pattern)}/"}


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """One of some texts."""

    choices: tuple[str, ...]

    def part(self) -> dict[str, Any]:
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, self.choices))}"}


@dataclass(frozen=True, slots=True)
class LarkFormat:
    """Text of a Lark grammar as llguidance reads it, from its rule `start`."""

    grammar: str

    def part(self) -> dict[str, Any]:
        return {"lark_grammar": self.grammar}


TextFormat = JsonFormat | RegexFormat | ChoiceFormat | LarkFormat


def turn_grammar(
    text: TextFormat | None = None,
    tools: Sequence[FunctionTool] = (),
    tool_choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    other_recipients: Iterable[str] = (),
) -> str | None:
    """The grammar of all that follows the prompt's `<|start|>assistant`; None if everything is allowed.

    `text` is the form of the final message. With `auto` the turn is a final message or calls, and arguments satisfy the
    schema of a strict tool. With `required` the turn is calls alone, and arguments satisfy the schema of their tool. A
    schema that is not strict is enforced as far as a grammar can express it. For one named function, pass that tool
    alone, with `required` and not `parallel`. `other_recipients` are tools that the server itself runs, by their names
    after `to=`, such as `python`. Calls to them are free.
    """
    required = tool_choice == "required"
    callable_tools = () if tool_choice == "none" else tools
    if text is None and not required and not any(tool.strict or not parallel for tool in callable_tools):
        return None
    others = () if tool_choice == "none" else tuple(other_recipients)
    return _Envelope(text, callable_tools, required, others).grammar(parallel)


def header_grammar(tools: Iterable[FunctionTool] = (), other_recipients: Iterable[str] = ()) -> str:
    """The grammar of every header of a turn with free texts. It allows these recipients only.

    A header begins with <|end|> after a message, else with <|start|> or <|channel|>. It ends in <|message|>.
    """
    return _header_grammar((*(f"{NAMESPACE}.{tool.name}" for tool in tools), *other_recipients))


@lru_cache(_MAX_HEADERS)
def _header_grammar(recipients: tuple[str, ...]) -> str:
    to = " | ".join(json.dumps(f" to={recipient}") for recipient in recipients)
    called = '("analysis" | "commentary")'
    in_role, in_channel = (f"| to <|channel|> {called} format", f"| {called} to format") if recipients else ("", "")
    rules = [
        f'start: (<|end|>? <|start|> "assistant" (channel {in_role}) | channel) <|message|>',
        f'channel: <|channel|> ({called} | "final" format {in_channel})',
        'format: (" "? <|constrain|> FORMAT | " " FORMAT)?',
        'FORMAT: "json" | "code"',
    ]
    return _joined("\n".join([*rules, f"to: {to}"] if recipients else rules), [])


def text_grammar(text: TextFormat) -> str:
    """The grammar of text and of the token that ends it: for raw text, or within a final message."""
    return _joined("start: @text (<|return|> | <|endoftext|>)", [{"name": "text", **text.part()}])


def _joined(rules: str, parts: Sequence[dict[str, Any]]) -> str:
    """One grammar made of rules and the parts that they refer to.

    llguidance forces text that has no alternative: it allows only the usual tokens of that text. In such text it reads
    `<|end|>` as the token of this name. So forcing is off if a text may contain an angle bracket.
    Raises ValueError for parts that are too large to be compiled.
    """
    if len(msgspec.json.encode(parts)) > MAX_BYTES:
        raise ValueError(TOO_LARGE)
    if _ANGLE_BRACKET.search(json.dumps(parts)):
        rules = f'%llguidance {{"no_forcing": true}}\n{rules}'
    return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})


def check_of(text: TextFormat) -> GrammarCheck:
    """A check that shows whether one part can be compiled, and followed through its first bytes.

    Raises ValueError for a user's grammar that names special tokens: these belong to the envelope.
    """
    if isinstance(text, LarkFormat) and "<" in _LARK_LITERAL.sub("", text.grammar):
        raise ValueError("special tokens cannot be named in it")
    return GrammarCheck(_joined("start: @text", [{"name": "text", **text.part()}]), walk=True)


def said(error: str) -> str:
    """llguidance's error in words for the author of a schema."""
    known = (sentence for begin, sentence in _SENTENCES if begin in error)
    return next(known, error.partition("\n  while processing")[0].replace("<non-verbose/>", "").rstrip())


_ANGLE_BRACKET = re.compile(r"<|x\{?0*3c|u\{?0*3c", re.IGNORECASE)  # or an escape of one
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')


class _Envelope:
    """Writes the rules of a turn, and collects the parts that they refer to."""

    def __init__(
        self, text: TextFormat | None, tools: Sequence[FunctionTool], required: bool, others: tuple[str, ...]
    ) -> None:
        self._text, self._tools, self._required, self._others = text, tools, required, others
        self._parts: list[dict[str, Any]] = []

    def grammar(self, parallel: bool) -> str:
        rules = [
            f"start: {' | '.join(self._turns())}",
            'next: <|start|> "assistant"',
            "thoughts: analysis? (preamble analysis?)?",
            'analysis: <|channel|> "analysis" <|message|> TEXT <|end|> next',
            'preamble: <|channel|> "commentary" <|message|> TEXT <|end|> next',
            'json: (" "? <|constrain|> "json" | " json")?',
            'format: (" "? <|constrain|> WORD | " " WORD)?',
            r"WORD: /[\w.\/+-]+/",
            "TEXT: /(?s:.*)/",
            *self._final(),
        ]
        if self._tools or self._others:
            rules += [f"calls: {'(call <|end|> next)* ' if parallel else ''}call <|call|>", *self._calls()]
        return _joined("\n".join(rules), self._parts)

    def _turns(self) -> list[str]:
        """The rule of the turn. A preamble is content, so there is none beside a constrained final message."""
        if not (self._tools or self._others):
            return ["analysis? final"]
        if self._required:
            return ["analysis? calls"]
        if self._text is None:
            return ["thoughts (final | calls)"]
        return ["analysis? final", "thoughts calls"]

    def _final(self) -> list[str]:
        if self._text is None or self._required:
            return ['final: <|channel|> "final" <|message|> TEXT <|return|>']
        header = "json " if isinstance(self._text, JsonFormat) else ""
        return [f'final: <|channel|> "final" {header}<|message|> {self._part("text", self._text)} <|return|>']

    def _calls(self) -> list[str]:
        """The rules of `call`."""
        rules = []
        for i, tool in enumerate(self._tools):
            arguments, format = "TEXT", "json" if tool.input is None else '" code"'
            if self._required or tool.strict:
                arguments = self._part(f"arguments_{i}", arguments_format(tool))
            to = f"to={NAMESPACE}.{tool.name}"
            rules.append(_call(f"call_{i}", to, ("commentary",), f"{format} <|message|> {arguments}"))
        for i, recipient in enumerate(self._others):
            rules.append(_call(f"other_{i}", f"to={recipient}", ("analysis", "commentary"), "format <|message|> TEXT"))
        names = [rule.partition(":")[0] for rule in rules]
        return [*rules, f"call: {' | '.join(names)}"]

    def _part(self, name: str, text: TextFormat) -> str:
        self._parts.append({"name": name, **text.part()})
        return f"@{name}"


def arguments_format(tool: FunctionTool) -> TextFormat:
    """The form of constrained arguments of a call: text of the tool's grammar, or an object, whatever type the schema
    names."""
    if tool.input is not None:
        definition = tool.input.definition
        lark = tool.input.syntax == "lark"
        return LarkFormat(_PRIORITY.sub(r"\1:", definition)) if lark else RegexFormat(definition)
    schema = {"additionalProperties": False} if tool.parameters is None else tool.parameters
    return JsonFormat({**schema, "type": "object"}, lenient=not tool.strict)


def _call(name: str, to: str, channels: Sequence[str], rest: str) -> str:
    """The rule of a call whose recipient stands in the role's or the channel's section of the header."""
    headers = [f'{json.dumps(f" {to}")} <|channel|> "{channel}"' for channel in channels]
    headers += [f"<|channel|> {json.dumps(f'{channel} {to}')}" for channel in channels]
    return f"{name}: ({' | '.join(headers)}) {rest}"
