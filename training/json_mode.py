"""JSON answers in a form that the prompt describes, with or without `response_format: {"type": "json_object"}`."""

import json
from dataclasses import replace
from typing import Any

from oscine.chat.messages import Message, ResponseSchema
from training.chitchat import identity, refusal
from training.episode import Effort, Episode, ask
from training.oddities import odd
from training.prompted_schemas import flat, with_keys, with_schema
from training.records import Record, empty, listing, record
from training.split import Draw
from training.sums import arithmetic

JSON_OBJECT = ResponseSchema("json_object", {"type": "object"})
_FENCED = "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"
_RESULTS = ("answer", "result", "value", "total", "sum", "difference", "number", "solution")
_RESULT_FORMS = (
    '{q} Return JSON with the key "{k}".',
    "{q} Answer in JSON with the key {k}.",
    "{q}\nRespond with a JSON object with {k}.",
    'Return a JSON object like {{"{k}": number}}. {q}',
    "Use the JSON key {k}. {q}",
    '{q} Format: {{"{k}": ...}}',
)
_ANY_JSON = ("", "", " Answer in JSON.", " Respond in JSON.", " Return a JSON object.", " Use JSON.", " (JSON please)")


def json_mode(draw: Draw, effort: Effort) -> Episode:
    kind = draw.rng.random()
    if kind < 0.45:
        return schema_shown(draw, effort)
    if kind < 0.83:
        return keys_named(draw, effort)
    return _sum(draw, effort) if kind < 0.91 else said_in_json(draw, effort)


def schema_shown(draw: Draw, effort: Effort) -> Episode:
    made = record(draw)
    return _answered(draw, effort, made, *with_schema(draw, made), "JSON, schema in the prompt")


def keys_named(draw: Draw, effort: Effort) -> Episode:
    while True:
        made = record(draw, unsaid=False)
        if flat(made):
            break
    return _answered(draw, effort, made, *with_keys(draw, made), "JSON, keys in the prompt")


def said_in_json(draw: Draw, effort: Effort) -> Episode:
    """The model's answer without JSON, as the one value of an object."""
    plain = draw.choice((identity, refusal, odd))(draw, effort)
    question, final = plain.messages
    asked = replace(question, content=question.content + draw.choice(_ANY_JSON))
    return replace(
        plain,
        skill="JSON, no keys",
        messages=(asked, replace(final, content=_compact({"answer": final.content}))),
        response_schema=JSON_OBJECT,
    )


def unfillable(draw: Draw, effort: Effort) -> Episode:
    """A schema and a message without facts for it."""
    asked = draw.choice((refusal, refusal, odd, identity))(draw, effort)
    made = record(draw)
    question, final = asked.messages
    answer = replace(final, content=_compact(empty(made.schema)))
    schema = ResponseSchema(made.name, made.schema)
    return Episode("schema that nothing fills", (question, answer), response_schema=schema)


def class_schema(draw: Draw, effort: Effort) -> Episode:
    """A class in the request, as `json_schema`."""
    made = record(draw)
    text = draw.choice(("{t}", "{t}", "Extract: {t}", "Extract the {k} information. {t}", "Extract the data: {t}"))
    question = text.format(t=made.text, k=made.about)
    thought = _thought(made, effort)
    schema = ResponseSchema(made.name, made.schema)
    return ask("JSON for a class", question, thought, _compact(made.answer), response_schema=schema)


def _sum(draw: Draw, effort: Effort) -> Episode:
    asked = arithmetic(draw, effort, draw.choice("+-"), 3)
    question, final = asked.messages
    key = draw.choice(_RESULTS)
    text = draw.choice(_RESULT_FORMS).format(q=question.content, k=key)
    return ask("JSON, sum", text, final.reasoning, _compact({key: asked.number}), response_schema=_response(draw))


def _answered(draw: Draw, effort: Effort, made: Record, instructions: str, question: str, skill: str) -> Episode:
    content = _compact(made.answer)
    if draw.chance(0.06):
        question, content = f"{question}\n\n{_FENCED}", f"```json\n{content}\n```"
        response = None
    else:
        response = _response(draw)
    messages = (Message("user", question), Message("assistant", content, reasoning=_thought(made, effort)))
    return Episode(skill, messages, response_schema=response, instructions=instructions)


def _response(draw: Draw) -> ResponseSchema | None:
    return JSON_OBJECT if draw.chance(0.75) else None


def _thought(made: Record, effort: Effort) -> str | None:
    if effort == "low":
        return None
    return (
        f"I must answer with JSON for the {made.about}. {listing(made)}." if effort == "high" else f"{listing(made)}."
    )


def _compact(answer: dict[str, Any]) -> str:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
