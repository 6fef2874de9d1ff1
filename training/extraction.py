"""JSON answers: facts of a few sentences, written down as a schema asks."""

import json
from dataclasses import dataclass
from typing import Any

from oscine.chat.messages import ResponseSchema
from training import words
from training.episode import Effort, Episode, ask
from training.split import Draw
from training.sums import arithmetic

_Schema = dict[str, Any]


@dataclass(frozen=True)
class _Field:
    names: tuple[str, ...]
    schema: _Schema
    make: Any  # Draw -> value
    forms: tuple[str, ...]  # what a sentence says of it; {v} is the value; for a boolean (true form, false form)


_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_LIST = {"type": "array", "items": {"type": "string"}}


def _enum(options: tuple[str, ...]) -> _Schema:
    return {"type": "string", "enum": list(options)}


def _price(draw: Draw) -> int | float:
    return draw.integer(1, 2000) if draw.chance(0.6) else draw.integer(1, 999) + draw.choice((0.5, 0.25, 0.99, 0.75))


_SIZES = ("small", "medium", "large")
_STATES = ("new", "used", "broken")
_MOODS = ("happy", "sad", "angry", "calm")
_PERSON = (
    _Field(
        ("age", "years", "age_years"),
        _INTEGER,
        lambda d: d.integer(1, 99),
        ("is {v} years old", "is {v}", "is aged {v}"),
    ),
    _Field(
        ("city", "town", "location", "home"), _STRING, words.city, ("lives in {v}", "comes from {v}", "is from {v}")
    ),
    _Field(
        ("job", "profession", "occupation"), _STRING, lambda d: d.choice(words.JOBS), ("works as a {v}", "is a {v}")
    ),
    _Field(
        ("hobbies", "interests", "likes"), _LIST, lambda d: d.several(words.HOBBIES, 1, 3), ("likes {v}", "enjoys {v}")
    ),
    _Field(("married", "is_married"), _BOOLEAN, lambda d: d.chance(0.5), ("is married", "is not married")),
    _Field(("pet", "animal"), _STRING, lambda d: d.choice(words.ANIMALS), ("has a {v}", "owns a {v}")),
    _Field(
        ("favorite_color", "colour"), _enum(words.COLOURS[:6]), lambda d: d.choice(words.COLOURS[:6]), ("loves {v}",)
    ),
    _Field(("children", "num_children"), _INTEGER, lambda d: d.integer(2, 9), ("has {v} children",)),
    _Field(("student", "is_student"), _BOOLEAN, lambda d: d.chance(0.5), ("is a student", "is not a student")),
    _Field(("mood", "feeling"), _enum(_MOODS), lambda d: d.choice(_MOODS), ("feels {v}", "is {v} today")),
    _Field(("friend", "partner", "boss"), _STRING, words.first_name, ("knows {v}", "works with {v}")),
)
_PRODUCT = (
    _Field(("price", "cost", "amount"), {"type": "number"}, _price, ("costs {v} euros", "has a price of {v}")),
    _Field(("color", "colour"), _STRING, lambda d: d.choice(words.COLOURS), ("is {v}", "comes in {v}")),
    _Field(("size",), _enum(_SIZES), lambda d: d.choice(_SIZES), ("is {v}", "has the size {v}")),
    _Field(("in_stock", "available"), _BOOLEAN, lambda d: d.chance(0.5), ("is in stock", "is not in stock")),
    _Field(("brand", "maker"), _STRING, lambda d: words.made_up(d).capitalize(), ("is made by {v}", "comes from {v}")),
    _Field(("quantity", "count", "stock"), _INTEGER, lambda d: d.integer(2, 500), ("is there {v} times",)),
    _Field(("condition", "state"), _enum(_STATES), lambda d: d.choice(_STATES), ("is {v}",)),
    _Field(("weight", "weight_kg"), {"type": "number"}, _price, ("weighs {v} kg",)),
    _Field(("tags", "keywords"), _LIST, lambda d: d.several(words.HOBBIES, 1, 3), ("is good for {v}",)),
)
_EVENT = (
    _Field(("date", "day"), _STRING, words.date, ("is on {v}", "takes place on {v}")),
    _Field(("time", "start"), _STRING, words.clock_time, ("starts at {v}", "begins at {v}")),
    _Field(("city", "place", "location"), _STRING, words.city, ("is in {v}", "takes place in {v}")),
    _Field(
        ("guests", "participants", "people"),
        _LIST,
        lambda d: [words.first_name(d) for _ in range(d.integer(1, 3))],
        ("has {v} as guests",),
    ),
    _Field(
        ("num_guests", "seats", "attendees"),
        _INTEGER,
        lambda d: d.integer(2, 900),
        ("has {v} seats", "is for {v} people"),
    ),
    _Field(("free", "is_free"), _BOOLEAN, lambda d: d.chance(0.5), ("is free", "is not free")),
    _Field(("weekday",), _enum(words.WEEKDAYS), lambda d: d.choice(words.WEEKDAYS), ("is on a {v}",)),
    _Field(("host", "organizer"), _STRING, words.full_name, ("is hosted by {v}", "is led by {v}")),
)
_EVENTS = ("Festival", "Concert", "Meeting", "Fair", "Workshop", "Party")
_GATHERINGS = ("fair", "party", "meeting", "class", "show", "tour")
_ASKS = (
    "{t}",
    "Extract the data: {t}",
    "Extract the information from this text: {t}",
    "{t} Give me JSON.",
    "Please answer in JSON. {t}",
    "Fill in the schema: {t}",
    "{t}\n\nExtract the fields.",
    "Parse this: {t}",
    "Turn this into JSON: {t}",
    "{t} What are the details?",
)
_INSTRUCTIONS = (
    "",
    "",
    "Extract the information.",
    "Answer in JSON.",
    "You extract data from text.",
    "Reply with JSON only.",
)


def extraction(draw: Draw, effort: Effort) -> Episode:
    if draw.chance(0.08):
        return _sum_as_json(draw, effort)
    if draw.chance(0.1):
        return _gathering(draw, effort)
    kind, fields = draw.choice((("person", _PERSON), ("product", _PRODUCT), ("event", _EVENT), ("person", _PERSON)))
    chosen = draw.several(fields, 1, 4 if draw.chance(0.8) else 5)
    subject_name, subject = _subject(draw, kind)
    properties: dict[str, _Schema] = {subject_name: dict(_STRING)}
    answer: dict[str, Any] = {subject_name: subject}
    said = []
    for field in chosen:
        name, made = draw.choice(field.names), field.make(draw)
        if name in answer:
            continue
        properties[name], answer[name] = dict(field.schema), made
        said.append(_say(draw, field, made))
    if draw.chance(0.25):
        properties, answer = _shuffled(draw, properties, answer)
    draw.rng.shuffle(said)
    question = draw.choice(_ASKS).format(t=_sentences(draw, subject, said, kind))
    if len(answer) > 2 and draw.chance(0.15):
        properties, answer = _nested(draw, properties, answer)
    thought = _thought(answer, effort, kind)
    schema = ResponseSchema(draw.choice((kind, f"{kind}_info", "response", "answer")), _object(draw, properties))
    return ask(
        "json", question, thought, _compact(answer), response_schema=schema, instructions=draw.choice(_INSTRUCTIONS)
    )


def _sum_as_json(draw: Draw, effort: Effort) -> Episode:
    """Arithmetic whose result is the one property of the answer."""
    operator = draw.choice("+-")
    episode = arithmetic(draw, effort, operator, 3)
    name = draw.choice(("answer", "result", "value", "total"))
    schema = ResponseSchema(draw.choice(("math", "result", "answer")), _object(draw, {name: {"type": "integer"}}))
    question, final = episode.messages
    return ask("json", question.content, final.reasoning, _compact({name: episode.number}), response_schema=schema)


def _gathering(draw: Draw, effort: Effort) -> Episode:
    """Who does what when, in one sentence that says the event last."""
    people = [words.first_name(draw) for _ in range(draw.integer(1, 3))]
    about, gathering = draw.choice(words.HOBBIES + words.JOBS + words.COLOURS), draw.choice(_GATHERINGS)
    event = f"{about} {gathering}"
    day = draw.choice(
        (draw.choice(words.WEEKDAYS), words.date(draw), f"{draw.integer(1, 28)} {draw.choice(words.MONTHS)}")
    )
    verb = "is" if len(people) == 1 else "are"
    forms = ("{p} {b} going to a {e} on {d}.", "On {d} {p} {b} going to a {e}.", "There is a {e} on {d} with {p}.")
    text = draw.choice(forms).format(p=words.join(people), b=verb, e=event, d=day)
    values = {
        draw.choice(("name", "event", "title")): (event, dict(_STRING)),
        draw.choice(("date", "day", "when")): (day, dict(_STRING)),
        draw.choice(("participants", "people", "guests")): (people, dict(_LIST)),
    }
    order = draw.several(list(values), len(values), len(values)) if draw.chance(0.5) else list(values)
    answer = {name: values[name][0] for name in order}
    name = draw.choice(("event", "calendar_event", "response", "meeting"))
    schema = ResponseSchema(name, _object(draw, {key: values[key][1] for key in order}))
    question = draw.choice(_ASKS).format(t=text)
    thought = _thought(answer, effort, "event")
    return ask(
        "json", question, thought, _compact(answer), response_schema=schema, instructions=draw.choice(_INSTRUCTIONS)
    )


def _subject(draw: Draw, kind: str) -> tuple[str, str]:
    if kind == "person":
        return draw.choice(("name", "name", "full_name", "person")), draw.choice((words.first_name, words.full_name))(
            draw
        )
    if kind == "product":
        thing = draw.choice(words.OBJECTS)
        return draw.choice(("name", "product", "item")), draw.choice((thing, f"{words.made_up(draw)} {thing}"))
    title = f"{words.made_up(draw).capitalize()} {draw.choice(_EVENTS)}"
    return draw.choice(("title", "name", "event")), title


def _say(draw: Draw, field: _Field, made: Any) -> str:
    if isinstance(made, bool):
        return field.forms[0 if made else 1]
    if isinstance(made, list):
        return draw.choice(field.forms).format(v=words.join(made))
    return draw.choice(field.forms).format(v=made)


def _sentences(draw: Draw, subject: str, said: list[str], kind: str) -> str:
    """One sentence or several about the subject."""
    head = f"The {subject}" if kind in ("product", "event") else subject
    if draw.chance(0.5):
        return f"{head} {words.join(said)}."
    pronoun = draw.choice(("He", "She")) if kind == "person" else "It"
    return " ".join(f"{head if i == 0 else pronoun} {part}." for i, part in enumerate(said))


def _shuffled(
    draw: Draw, properties: dict[str, _Schema], answer: dict[str, Any]
) -> tuple[dict[str, _Schema], dict[str, Any]]:
    order = draw.several(list(properties), len(properties), len(properties))
    return {name: properties[name] for name in order}, {name: answer[name] for name in order}


def _nested(
    draw: Draw, properties: dict[str, _Schema], answer: dict[str, Any]
) -> tuple[dict[str, _Schema], dict[str, Any]]:
    """The last two properties as an object of their own."""
    *outer, a, b = properties
    name = draw.choice(("details", "info", "data"))
    inner = {"type": "object", "properties": {a: properties[a], b: properties[b]}, "required": [a, b]}
    return (
        {**{key: properties[key] for key in outer}, name: inner},
        {**{key: answer[key] for key in outer}, name: {a: answer[a], b: answer[b]}},
    )


def _object(draw: Draw, properties: dict[str, _Schema]) -> _Schema:
    schema: _Schema = {"type": "object", "properties": properties}
    if draw.chance(0.85):
        schema["required"] = list(properties)
    if draw.chance(0.6):
        schema["additionalProperties"] = False
    if draw.chance(0.2):
        schema = {"title": draw.choice(("Answer", "Person", "Item", "Result")), **schema}
    return schema


def _thought(answer: dict[str, Any], effort: Effort, kind: str) -> str | None:
    if effort == "low":
        return None
    listed = ", ".join(f"{name}: {_plain(made)}" for name, made in _flat(answer))
    return f"I must answer with JSON for the {kind}. {listed}." if effort == "high" else f"{listed}."


def _flat(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, made in answer.items():
        pairs += _flat(made) if isinstance(made, dict) else [(name, made)]
    return pairs


def _plain(made: Any) -> str:
    if isinstance(made, bool):
        return "yes" if made else "no"
    return ", ".join(made) if isinstance(made, list) else str(made)


def _compact(answer: dict[str, Any]) -> str:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
