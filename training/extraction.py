"""JSON answers: facts of a few sentences, in the form of a schema."""

import json
from typing import Any

from oscine.chat.messages import ResponseSchema
from training import words
from training.episode import Effort, Episode, ask
from training.fields import EVENT, LIST, PERSON, PRODUCT, STRING, Schema, opening, say, sentences
from training.split import Draw
from training.sums import arithmetic

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
    kind, fields = draw.choice((("person", PERSON), ("product", PRODUCT), ("event", EVENT), ("person", PERSON)))
    chosen = draw.several(fields, 1, 4 if draw.chance(0.8) else 5)
    subject_name, subject = opening(draw, kind)
    properties: dict[str, Schema] = {subject_name: dict(STRING)}
    answer: dict[str, Any] = {subject_name: subject}
    said = []
    for field in chosen:
        name, made = draw.choice(field.names), field.make(draw)
        if name in answer:
            continue
        properties[name], answer[name] = dict(field.schema), made
        said.append(say(draw, field, made))
    if draw.chance(0.25):
        properties, answer = _shuffled(draw, properties, answer)
    draw.rng.shuffle(said)
    question = draw.choice(_ASKS).format(t=sentences(draw, subject, said, kind))
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
    """A person, an activity and a time, in one sentence with the event at its end."""
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
        draw.choice(("name", "event", "title")): (event, dict(STRING)),
        draw.choice(("date", "day", "when")): (day, dict(STRING)),
        draw.choice(("participants", "people", "guests")): (people, dict(LIST)),
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


def _shuffled(
    draw: Draw, properties: dict[str, Schema], answer: dict[str, Any]
) -> tuple[dict[str, Schema], dict[str, Any]]:
    order = draw.several(list(properties), len(properties), len(properties))
    return {name: properties[name] for name in order}, {name: answer[name] for name in order}


def _nested(
    draw: Draw, properties: dict[str, Schema], answer: dict[str, Any]
) -> tuple[dict[str, Schema], dict[str, Any]]:
    """The last two properties as an object of their own."""
    *outer, a, b = properties
    name = draw.choice(("details", "info", "data"))
    inner = {"type": "object", "properties": {a: properties[a], b: properties[b]}, "required": [a, b]}
    return (
        {**{key: properties[key] for key in outer}, name: inner},
        {**{key: answer[key] for key in outer}, name: {a: answer[a], b: answer[b]}},
    )


def _object(draw: Draw, properties: dict[str, Schema]) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
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
