"""Prompts that describe the form of a JSON answer: by a schema, an example or the names of its keys, as clients do."""

import json
from typing import Any

from training import words
from training.fields import Schema
from training.records import Record
from training.split import Draw

_TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean", "array": "list"}
_PYTHON_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list[str]"}


def with_schema(draw: Draw, made: Record) -> tuple[str, str]:
    """Instructions and message, one of which holds the schema."""
    named = {"title": made.name, **made.schema} if draw.chance(0.5) else made.schema
    schema = _dumped(draw, named)
    ask = draw.choice(_ASKS).format(t=made.text, k=made.about)
    kind = draw.rng.random()
    if kind < 0.3:
        return _instructor(draw, schema), ask
    if kind < 0.45 and not made.unsaid and flat(made):
        return _dspy(draw, made)
    form = draw.choice(_FORMS).replace("SCHEMA", schema).replace("NAME", made.name)
    if draw.chance(0.5):
        return form, ask
    return "", draw.choice(("{f}\n\n{a}", "{a}\n\n{f}", "Answer the user query.\n{f}\n{a}")).format(f=form, a=ask)


def flat(made: Record) -> bool:
    """Whether no value is an object or a list of objects; for these, keys alone say too little."""
    listed = [item for value in made.answer.values() for item in (value if isinstance(value, list) else [value])]
    return not any(isinstance(item, dict) for item in listed)


def with_keys(draw: Draw, made: Record) -> tuple[str, str]:
    """Instructions and message, one of which names the keys."""
    properties = made.schema["properties"]
    typed = draw.chance(0.4)
    keys = [_key(draw, key, properties[key], typed) for key in made.answer]
    style = draw.rng.random()
    if style < 0.55:
        quote = draw.choice(("", "", '"', "'", "`"))
        listed = words.join(keys if typed else [f"{quote}{key}{quote}" for key in keys])
    elif style < 0.75:
        listed = ", ".join(keys)
    elif style < 0.87:
        listed = "\n" + "\n".join(f"- {key}" for key in keys)
    else:
        listed = _example(draw, made)
    form = draw.choice(_KEY_FORMS if style < 0.87 else _EXAMPLE_FORMS).format(keys=listed, k=made.about)
    if draw.chance(0.3):
        return form, draw.choice(_ASKS).format(t=made.text, k=made.about)
    return "", draw.choice(("{f}\n\n{t}", "{f} {t}", "{t} {f}", "{t}\n{f}", "{f}\nText: {t}")).format(
        f=form, t=made.text
    )


_ASKS = (
    "{t}",
    "{t}",
    "{t}",
    "Extract: {t}",
    "Extract {t}",
    "Extract the {k} from: {t}",
    "Extract the data: {t}",
    "Text: {t}",
    "Parse this text: {t}",
    "What {k} is this? {t}",
    "Please extract the details from the following text: {t}",
)
_FORMS = (
    "Always respond with a JSON object that's compatible with this schema:\n\nSCHEMA\n\n"
    "Don't include any text or Markdown fencing before or after.",
    "Answer with JSON that matches this schema: SCHEMA",
    "Respond with a JSON object that follows this JSON schema:\nSCHEMA",
    "Return JSON only. The schema is:\n\nSCHEMA",
    "Your answer must be valid JSON for the schema NAME:\n```json\nSCHEMA\n```",
    "You extract data from text. Output a JSON object with this schema:\n```\nSCHEMA\n```",
    "You are a helpful assistant that answers in JSON. Here's the json schema you must adhere to:\n"
    "<schema>\nSCHEMA\n</schema>",
    "Use this schema for the answer: SCHEMA",
    "# Output format\nJSON schema of NAME:\nSCHEMA",
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\nAs an example, for "
    'the schema {"properties": {"foo": {"title": "Foo", "description": "a list of strings", "type": "array", "items": '
    '{"type": "string"}}}, "required": ["foo"]} the object {"foo": ["bar", "baz"]} is a well-formatted instance of the '
    'schema. The object {"properties": {"foo": ["bar", "baz"]}} is not well-formatted.\n\nHere is the output schema:\n'
    "```\nSCHEMA\n```",
    "STRICT OUTPUT FORMAT:\n- Return only the JSON value that conforms to the schema. Do not include any additional "
    "text, explanations, headings, or separators.\n- Do not wrap the JSON in Markdown or code fences (no ``` or "
    "```json).\n\n"
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\nHere is the output "
    "schema (shown in a code block for readability only):\n```\nSCHEMA\n```",
)
_KEY_FORMS = (
    "Return a JSON object with {keys}.",
    "Return a JSON object with {keys} of the {k}.",
    "Return a JSON object with the keys {keys}.",
    "return json with {keys}",
    "Answer in JSON with the fields {keys}.",
    "Respond with a JSON object that has the keys {keys}.",
    "Give me a JSON object with {keys} for this text.",
    "Respond in JSON format with the following keys: {keys}",
    "Extract {keys} as JSON.",
    "Extract {keys} from the text and return a JSON object.",
    "Use JSON. Keys: {keys}",
    "You are an assistant that outputs JSON with {keys}.",
    "Write {keys} as a JSON object.",
    "JSON output only, fields: {keys}",
    "Respond with a JSON object in the following order of fields: {keys}.",
    "Convert this to JSON with {keys}.",
    "Please answer with JSON that contains {keys}.",
)
_EXAMPLE_FORMS = (
    "Answer in JSON like this: {keys}",
    "Return JSON in the format {keys}",
    "Respond in this JSON format:\n{keys}",
    "The answer must be JSON:\n```json\n{keys}\n```",
    "Use exactly this structure: {keys}",
    "Reply with JSON of the form {keys} and nothing else.",
    "Output JSON: {keys} for:",
    "Output: {keys}",
)


def _dumped(draw: Draw, schema: Schema) -> str:
    kind = draw.rng.random()
    if kind < 0.4:
        return json.dumps(schema, indent=2, ensure_ascii=False)
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":") if kind < 0.55 else None)


def _instructor(draw: Draw, schema: str) -> str:
    pad = draw.choice(("", "            ", "                ", "        "))
    lines = (
        "As a genius expert, your task is to understand the content and provide",
        "the parsed objects in json that match the following json_schema:\n",
        "",
        schema,
        "",
        "Make sure to return an instance of the JSON, not the schema itself",
    )
    text = "\n".join(f"{pad}{line}" if line else line for line in lines)
    return f"\n{text}\n{pad}" if pad or draw.chance(0.5) else text


def _dspy(draw: Draw, made: Record) -> tuple[str, str]:
    """A signature: one input field, and the properties as output fields."""
    source = draw.choice(("text", "text", "question", "passage", "document", "sentence", "input", "context"))
    kinds = {key: _kind(made.schema["properties"][key]) for key in made.answer}
    outputs = "\n".join(
        f"{i}. `{key}` ({_PYTHON_TYPES.get(kind, 'dict')}):" for i, (key, kind) in enumerate(kinds.items(), 1)
    )
    notes = {"boolean": "must be True or False", "integer": "must be a single int value"}
    notes["number"] = "must be a single float value"
    notes["array"] = 'must adhere to the JSON schema: {"type": "array", "items": {"type": "string"}}'
    shown = {}
    for key, kind in kinds.items():
        note = f"{' ' * 8}# note: the value you produce {notes[kind]}" if kind in notes else ""
        shown[key] = f"{{{key}}}{note}"
    listed = ", ".join(f"`{key}`" for key in kinds)
    system = (
        f"Your input fields are:\n1. `{source}` (str):\nYour output fields are:\n{outputs}\n"
        "All interactions will be structured in the following way, with the appropriate values filled in.\n\n"
        f"Inputs will have the following structure:\n\n[[ ## {source} ## ]]\n{{{source}}}\n\n"
        f"Outputs will be a JSON object with the following fields.\n\n{json.dumps(shown, indent=2)}\n"
        f"In adhering to this structure, your objective is: \n        Given the fields `{source}`, produce the fields "
        f"{listed}."
    )
    typed = ", then ".join(
        f"`{key}`" + ("" if kind == "string" else f" (must be formatted as a valid Python {_PYTHON_TYPES.get(kind)})")
        for key, kind in kinds.items()
    )
    last = f"Respond with a JSON object in the following order of fields: {typed}."
    return system, f"[[ ## {source} ## ]]\n{made.text}\n\n{last}"


def _kind(schema: Schema) -> str:
    if "anyOf" in schema:
        return _kind(schema["anyOf"][0])
    return str(schema.get("type", "object"))


def _key(draw: Draw, key: str, schema: Schema, typed: bool) -> str:
    if not typed:
        return key
    kind = _TYPES.get(_kind(schema), "object")
    return draw.choice((f"{key} ({kind})", f"{key}: {kind}", f'"{key}" ({kind})'))


def _example(draw: Draw, made: Record) -> str:
    """The object with types or dots for values."""
    properties = made.schema["properties"]
    style = draw.choice(("type", "dots", "angle"))
    shown: dict[str, Any] = {}
    for key in made.answer:
        kind = _TYPES.get(_kind(properties[key]), "object")
        shown[key] = {"type": kind, "dots": "...", "angle": f"<{key}>"}[style]
    text = json.dumps(shown)
    return text.replace('"<', "<").replace('>"', ">") if draw.chance(0.3) else text
