"""The functions declared in a conversation, from families or made up, each with a question that asks for it."""

from dataclasses import dataclass
from typing import Any

from oscine.chat.messages import FunctionTool
from training import words
from training.function_kinds import (
    BOOLEAN,
    INTEGER,
    KINDS,
    LEVELS,
    NUMBER,
    STRING,
    Kind,
    Parameter,
    Value,
    amount,
    between,
    enum,
    one_of,
)
from training.split import Draw


@dataclass(frozen=True)
class Function:
    """One function made from a kind, with a question for it and the call that the question asks for."""

    tool: FunctionTool
    question: str
    arguments: dict[str, Value]
    results: tuple[str, ...]
    purpose: str  # no two declared functions share it


_VERBS = words.listed(
    """load open close start stop list update delete move copy merge scan lock sync pack sort count paint clean
    watch run"""
)
_SYNTHETIC = (
    (STRING, words.city),
    (STRING, words.first_name),
    (STRING, lambda d: words.made_up(d)),
    (STRING, lambda d: words.letters_and_digits(d, d.integer(4, 8))),
    (STRING, words.date),
    (INTEGER, between(0, 9999)),
    (NUMBER, amount),
    (BOOLEAN, lambda d: d.chance(0.5)),
    (enum(*LEVELS), one_of(LEVELS)),
    (enum(*words.COLOURS[:4]), one_of(words.COLOURS[:4])),
)
_KEYS = words.listed(
    """name city id color size mode level target source group owner region label path speed depth user kind zone
    tag"""
)


def make_function(draw: Draw, kinds: tuple[Kind, ...] = KINDS) -> Function:
    """A function of one of the kinds (the first kind is the most frequent), or a made-up one."""
    if draw.chance(0.22):
        return _unknown_function(draw)
    kind = draw.choice(kinds) if draw.chance(0.85) else kinds[0]
    chosen = _chosen(draw, kind)
    arguments = {name: parameter.make(draw) for name, parameter in chosen.items() if not parameter.extra}
    form = draw.choice(kind.forms)
    question = form.rstrip("?.").format(*(_said(made) for made in arguments.values()))
    extras = {name: parameter for name, parameter in chosen.items() if parameter.extra and draw.chance(0.4)}
    for name, parameter in extras.items():
        arguments[name] = parameter.make(draw)
        question += parameter.extra.format(_said(arguments[name]))
    question += form[-1] if form[-1] in "?." else draw.choice(("", "", ".", "?"))
    ordered = {name: arguments[name] for name in chosen if name in arguments}
    return Function(_tool(draw, kind, chosen), _polite(draw, question), ordered, kind.results, kind.nouns)


def _styled(draw: Draw, verb: str, noun: str) -> str:
    """A function's name in one of the usual styles."""
    if draw.chance(0.15):
        noun = f"{noun}_{draw.choice(('v2', 'api', 'tool', 'service', 'info', 'data', 'now'))}"
    if draw.chance(0.15):
        return verb + "".join(part.capitalize() for part in noun.split("_"))
    return f"{verb}_{noun}" if draw.chance(0.9) else f"{noun}_{verb}"


def _name_of(draw: Draw, kind: Kind) -> str:
    verbs, nouns = kind.verbs.split(), kind.nouns.split()
    return draw.make("function", lambda: _styled(draw, draw.choice(verbs), draw.choice(nouns)))


def _chosen(draw: Draw, kind: Kind) -> dict[str, Parameter]:
    """Name -> parameter; a function may lack the optional ones."""
    chosen: dict[str, Parameter] = {}
    for parameter in kind.parameters:
        if parameter.extra and draw.chance(0.5):
            continue
        free = [name for name in parameter.names if name not in chosen]
        chosen[draw.choice(free)] = parameter
    return chosen


def _tool(draw: Draw, kind: Kind, chosen: dict[str, Parameter]) -> FunctionTool:
    described = draw.chance(0.6)
    properties = {}
    for name, parameter in chosen.items():
        description = {"description": _described(draw, name, parameter)} if described else {}
        properties[name] = {**parameter.schema, **description}
    required = [name for name, parameter in chosen.items() if not parameter.extra]
    description = _purpose(draw, kind) if draw.chance(0.85) else ""
    return FunctionTool(_name_of(draw, kind), description, _schema(draw, properties, required))


def _described(draw: Draw, name: str, parameter: Parameter) -> str:
    """A comment on a parameter; its examples are not what the user asks for."""
    subject = draw.choice((parameter.description or f"The {name}", f"The {name}", f"The {name} of the request"))
    kind = draw.rng.random()
    if kind < 0.35 or "enum" in parameter.schema:
        return subject
    example, other = parameter.make(draw), parameter.make(draw)
    forms = (
        "{s}, e.g. {e}",
        "{s} e.g. {e}, {f}",
        "{s}, for example {e} or {f}",
        "{s} (like {e})",
        "{s}. Example: {e}",
        "{s}, such as '{e}'",
    )
    return draw.choice(forms).format(s=subject, e=example, f=other)


def _purpose(draw: Draw, kind: Kind) -> str:
    """The description of a function, in many wordings."""
    if draw.chance(0.45):
        return draw.choice(kind.descriptions)
    verb, noun = draw.choice(kind.verbs.split()), draw.choice(kind.nouns.split()).replace("_", " ")
    forms = (
        "{v} the {n}",
        "{v} {n} for the user.",
        "This function can {w} the {n}.",
        "Use it to {w} the {n}.",
        "{v} {n} with the given parameters.",
        "Returns the {n}.",
        "{v} the current {n} for a given request.",
        "Retrieves {n} data. Call it when the user asks for the {n}.",
    )
    return draw.choice(forms).format(v=verb.capitalize(), w=verb, n=noun)


def _schema(draw: Draw, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    strict = {"additionalProperties": False} if draw.chance(0.3) else {}
    return {"type": "object", "properties": properties, "required": required, **strict}


def _unknown_function(draw: Draw) -> Function:
    """A made-up name and made-up parameters; the question names them."""
    verb = draw.choice(_VERBS)
    noun = draw.choice((draw.choice(words.NOUNS), words.made_up(draw)))
    other = draw.choice(words.NOUNS)
    tool_name = draw.make(
        "function",
        lambda: _styled(
            draw, draw.choice((verb, words.made_up(draw))), f"{noun}_{other}" if draw.chance(0.2) else noun
        ),
    )
    properties: dict[str, Any] = {}
    arguments: dict[str, Value] = {}
    for _ in range(draw.integer(1, 4)):
        key = draw.choice(_KEYS) if draw.chance(0.7) else words.made_up(draw)
        schema, make = draw.choice(_SYNTHETIC)
        properties[key], arguments[key] = schema, make(draw)
    pairs = words.join([f"{key}{draw.choice((' ', ' = ', ': '))}{_said(made)}" for key, made in arguments.items()])
    forms = (
        f"Call {tool_name} with {pairs}.",
        f"{verb.capitalize()} the {noun} with {pairs}.",
        f"Use {tool_name}: {pairs}",
    )
    tool = FunctionTool(tool_name, f"{verb.capitalize()} the {noun}.", _schema(draw, properties, list(properties)))
    results = tuple(draw.several(("status", "id", "result", "count", "state", "total"), 1, 2))
    return Function(tool, draw.choice(forms), arguments, results, tool_name)


def _said(made: Value) -> str:
    return ("yes" if made else "no") if isinstance(made, bool) else str(made)


def _polite(draw: Draw, question: str) -> str:
    kind = draw.rng.random()
    if kind < 0.06:
        return f"{draw.choice(('Hi!', 'Hello.', 'Hey,', 'Please:'))} {question}"
    if kind < 0.1:
        return question.rstrip("?.")
    if kind < 0.14 and question[-1] not in "?.":
        return f"{question}, please"
    return question[0].lower() + question[1:] if kind < 0.2 else question
