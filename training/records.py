"""A class as clients write it, a text with facts about one thing or several, and the values that fill the class."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from training import words
from training.fields import EVENT, INTEGER, PERSON, PRODUCT, STRING, Field, Schema, opening, say, sentences
from training.function_kinds import NUMBER
from training.recall import filler
from training.scenes import scene
from training.split import Draw

NOT_SAID = "not said"


@dataclass(frozen=True)
class Record:
    name: str  # of the class
    about: str  # the kind of thing
    text: str
    schema: Schema
    answer: dict[str, Any]
    unsaid: tuple[str, ...] = ()  # properties that are missing in the text


@dataclass(frozen=True)
class _Part:
    """One property and the words of the text about it; `said` is "" if there are none."""

    key: str
    schema: Schema
    value: Any
    said: str
    short: str = ""
    missing: bool = False


_NAMES = {
    "person": """User UserInfo UserDetail UserDetails UserProfile Person PersonInfo Customer Employee Contact Profile
        Character Patient Student Member Human Author Player""",
    "product": "Product Item ProductInfo Article Listing Offer ProductDetails Goods ShopItem",
    "event": "Event CalendarEvent EventInfo Appointment EventDetails Happening Show Gathering",
    "thing": "Record Entry Thing Device Asset Document Ticket Invoice Order Report Measurement",
}
_ANY_NAMES = "Response Output Result Data Extraction Answer OutputModel Info Details Facts"
_SHORT = {
    "age": "{v} years old",
    "city": "from {v}",
    "job": "{v}",
    "price": "{v} euros",
    "color": "{v}",
    "pet": "owner of a {v}",
    "married": "married|not married",
}


def _email(draw: Draw) -> str:
    return f"{words.first_name(draw).lower()}@{words.made_up(draw)}.{draw.choice(('com', 'org', 'net', 'de', 'io'))}"


def _phone(draw: Draw) -> str:
    return f"{draw.integer(100, 999)}-{draw.integer(1000, 9999)}"


def _code(draw: Draw) -> str:
    letters = "".join(draw.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(draw.integer(1, 3)))
    return f"{letters}-{draw.integer(10, 9999)}"


def _company(draw: Draw) -> str:
    return f"{words.made_up(draw).capitalize()} {draw.choice(('Inc', 'Ltd', 'Systems', 'Group', 'Labs', 'Foods'))}"


def _street(draw: Draw) -> str:
    return f"{draw.integer(1, 200)} {words.made_up(draw).capitalize()} {draw.choice(('Street', 'Road', 'Avenue'))}"


def _decimal(draw: Draw) -> float:
    return draw.integer(0, 99) + draw.choice((0.1, 0.2, 0.25, 0.5, 0.75, 0.9))


_LABELS: tuple[tuple[str, Schema, Callable[[Draw], Any]], ...] = (
    ("email", STRING, _email),
    ("email address", STRING, _email),
    ("phone", STRING, _phone),
    ("phone number", STRING, _phone),
    ("company", STRING, _company),
    ("employer", STRING, _company),
    ("address", STRING, _street),
    ("street", STRING, _street),
    ("nickname", STRING, lambda d: words.made_up(d).capitalize()),
    ("last name", STRING, lambda d: d.choice(words.LAST_NAMES)),
    ("country", STRING, lambda d: words.made_up(d).capitalize()),
    ("language", STRING, lambda d: d.choice(words.LANGUAGES)),
    ("birthday", STRING, words.date),
    ("due date", STRING, words.date),
    ("deadline", STRING, words.date),
    ("title", STRING, words.phrase),
    ("subject", STRING, words.phrase),
    ("topic", STRING, lambda d: d.choice(words.HOBBIES)),
    ("order number", STRING, _code),
    ("serial number", STRING, _code),
    ("code", STRING, _code),
    ("reference", STRING, _code),
    ("height", NUMBER, _decimal),
    ("temperature", NUMBER, _decimal),
    ("score", NUMBER, _decimal),
    ("rating", INTEGER, lambda d: d.integer(1, 10)),
    ("salary", INTEGER, lambda d: d.integer(10, 9000)),
    ("account number", INTEGER, lambda d: d.integer(100, 99999)),
    ("room", INTEGER, lambda d: d.integer(1, 900)),
    ("floor", INTEGER, lambda d: d.integer(1, 60)),
    ("year", INTEGER, lambda d: d.integer(1900, 2029)),
    ("speed", INTEGER, lambda d: d.integer(1, 300)),
    ("level", INTEGER, lambda d: d.integer(1, 99)),
    ("number of seats", INTEGER, lambda d: d.integer(2, 500)),
)
_NEVER_IN_SCENES = ("salary", "height", "account number", "serial number", "nickname", "rating", "room", "floor")
_KINDS: dict[str, tuple[Field, ...]] = {"person": PERSON, "product": PRODUCT, "event": EVENT, "thing": ()}


def record(draw: Draw, unsaid: bool = True) -> Record:
    """Facts about one thing, sometimes about several; sometimes a property is not said, if `unsaid`."""
    if draw.chance(0.35):
        return _of_scene(draw, unsaid)
    kind = draw.choice(("person", "person", "person", "product", "event", "thing"))
    if draw.chance(0.1):
        return _several(draw, kind)
    subject_key, subject = _opening(draw, kind)
    style = _style(draw)
    parts = _parts(draw, kind, {subject_key})
    if unsaid and draw.chance(0.12):
        parts = _with_unsaid(draw, parts)
    text = _text(draw, kind, subject_key, subject, parts)
    if not parts or draw.chance(0.93):
        parts = [_Part(subject_key, dict(STRING), subject, ""), *parts]
    if draw.chance(0.2):
        parts = draw.several(parts, len(parts), len(parts))
    parts = _renamed(draw, kind, parts)
    if len(parts) > 2 and draw.chance(0.1):
        return _nested(draw, kind, style, text, parts)
    schema = _object(draw, style, class_name(draw, kind), parts)
    name = schema.pop("class")
    return Record(name, kind, text, schema, _answer(schema, parts), _unsaid(parts))


def _of_scene(draw: Draw, unsaid: bool) -> Record:
    """All facts of a sentence, or some, and sometimes one that it lacks."""
    made = scene(draw)
    facts = made.facts
    if len(facts) > 1 and draw.chance(0.35):
        facts = draw.several(facts, 1, len(facts))
    parts = [_Part(fact.key, fact.schema, fact.value, "") for fact in facts]
    if unsaid and draw.chance(0.1):
        label, schema, make = draw.choice([entry for entry in _LABELS if entry[0] in _NEVER_IN_SCENES])
        key = label.replace(" ", "_")
        if all(key != part.key for part in parts):
            parts.append(_Part(key, dict(schema), make(draw), "", missing=True))
    parts = _renamed(draw, made.about, parts)
    names = _ANY_NAMES if draw.chance(0.1) else made.names
    schema = _object(draw, _style(draw), draw.choice(names.split()), parts)
    name = schema.pop("class")
    return Record(name, made.about, made.text, schema, _answer(schema, parts), _unsaid(parts))


def empty(schema: Schema, root: Schema | None = None) -> Any:
    """The value for an unknown fact: null if allowed, else an empty value of its type."""
    root = schema if root is None else root
    if "$ref" in schema:
        return empty(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if any(variant.get("type") == "null" for variant in schema.get("anyOf", ())):
        return None
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        properties = schema.get("properties", {})
        return {key: empty(properties[key], root) for key in properties if key in schema.get("required", properties)}
    return {"string": "", "integer": 0, "number": 0, "boolean": False, "array": []}[schema["type"]]


def class_name(draw: Draw, kind: str) -> str:
    if draw.chance(0.15):
        return words.made_up(draw).capitalize()
    return draw.choice((_ANY_NAMES if draw.chance(0.15) else _NAMES[kind]).split())


def _opening(draw: Draw, kind: str) -> tuple[str, str]:
    if kind != "thing":
        return opening(draw, kind)
    thing = draw.choice(words.NOUNS + words.OBJECTS)
    named = draw.choice((f"{draw.choice(words.COLOURS)} {thing}", f"{words.made_up(draw)} {thing}", thing))
    return draw.choice(("name", "item", "device", "title", "what")), named


def _parts(draw: Draw, kind: str, taken: set[str]) -> list[_Part]:
    fields = _KINDS[kind]
    chosen = draw.several(fields, 1, draw.choice((1, 1, 2, 3, 4))) if fields else []
    parts = []
    for field in chosen:
        key, made = draw.choice(field.names), field.make(draw)
        parts.append(_Part(key, dict(field.schema), made, say(draw, field, made), _short(field.names[0], made)))
    count = draw.choice((0, 0, 0, 1, 2)) if fields else draw.integer(1, 4)
    for _ in range(count):
        label, schema, make = draw.choice(_LABELS) if draw.chance(0.75) else _made_up_label(draw)
        made = make(draw)
        said = draw.choice(("has the {l} {v}", "has {l} {v}")).format(l=label, v=_spoken(made))
        parts.append(_Part(label.replace(" ", "_"), dict(schema), made, said))
    unique: dict[str, _Part] = {}
    for part in parts:
        if part.key not in taken:
            unique.setdefault(part.key, part)
    return list(unique.values())


def _made_up_label(draw: Draw) -> tuple[str, Schema, Callable[[Draw], Any]]:
    label = words.made_up(draw)
    if draw.chance(0.4):
        label = f"{draw.choice(words.NOUNS)} {draw.choice(('code', 'name', 'value', 'size', 'count', 'type'))}"
    return label, *draw.choice(((INTEGER, lambda d: d.integer(0, 9999)), (STRING, words.made_up), (STRING, _code)))


def _short(name: str, made: Any) -> str:
    form = _SHORT.get(name, "")
    if isinstance(made, bool):
        return form.split("|")[0 if made else 1] if form else ""
    return form.format(v=made)


def _spoken(made: Any) -> str:
    return words.join(made) if isinstance(made, list) else str(made)


def _with_unsaid(draw: Draw, parts: list[_Part]) -> list[_Part]:
    """One of the properties, or an additional one, is missing in the text."""
    at = draw.integer(0, len(parts) - 1) if parts else 0
    return [replace(part, said="", short="", missing=True) if i == at else part for i, part in enumerate(parts)]


def _text(draw: Draw, kind: str, key: str, subject: str, parts: list[_Part]) -> str:
    said = [part for part in parts if not part.missing]
    if not said:
        return f"{draw.choice(('This is', 'Here is', 'I know'))} {subject}."
    layout = draw.rng.random()
    if layout < 0.12:
        lines = [f"{_label(draw, key)}: {subject}"] + [f"{_label(draw, p.key)}: {_listed(p.value)}" for p in said]
        return draw.choice(("\n", "\n", ", ", "; ")).join(lines)
    if layout < 0.3 and all(part.short for part in said):
        return f"{subject}, {', '.join(part.short for part in said)}"
    spoken = [part.said for part in said]
    draw.rng.shuffle(spoken)
    text = sentences(draw, subject, spoken, "product" if kind == "thing" else kind)
    if draw.chance(0.1):
        text = f"{filler(draw)} {text}" if draw.chance(0.5) else f"{text} {filler(draw)}"
    return text.rstrip(".") if draw.chance(0.15) else text


def _label(draw: Draw, key: str) -> str:
    label = key.replace("_", " ")
    return label.capitalize() if draw.chance(0.7) else label


def _listed(made: Any) -> str:
    if isinstance(made, bool):
        return "yes" if made else "no"
    return ", ".join(made) if isinstance(made, list) else str(made)


def _renamed(draw: Draw, kind: str, parts: list[_Part]) -> list[_Part]:
    """Keys in the style of another language or project."""
    style = draw.rng.random()
    if style < 0.1:
        return [replace(part, key=_camel(part.key)) for part in parts]
    if style < 0.16:
        return [replace(part, key=f"{kind}_{part.key}") for part in parts]
    return parts


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _style(draw: Draw) -> str:
    return draw.choice(("plain", "plain", "pydantic", "pydantic", "pydantic", "strict"))


def _object(draw: Draw, style: str, name: str, parts: list[_Part]) -> Schema:
    """The schema of a class. Its name is under "class", and must be removed."""
    described = draw.chance(0.3)
    properties = {part.key: _property(draw, style, part, described) for part in parts}
    required = [part.key for part in parts if "default" not in properties[part.key]]
    if style == "pydantic" and draw.chance(0.2):
        required.sort()
    schema: Schema = {"properties": properties, "required": required, "title": name, "type": "object", "class": name}
    if style == "pydantic":
        return {"description": _docstring(draw, name), **schema} if draw.chance(0.25) else schema
    del schema["title"]
    schema = {"type": "object", **{key: made for key, made in schema.items() if key != "type"}}
    if style == "strict" or draw.chance(0.2):
        schema["additionalProperties"] = False
    return schema


def _docstring(draw: Draw, name: str) -> str:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    forms = ("{n} information", "Information about a {n}.", "A {n}.", "The {n} of the text.", "Represents a {n}.")
    return draw.choice(forms).format(n=spaced)


def _property(draw: Draw, style: str, part: _Part, described: bool) -> Schema:
    schema = dict(part.schema)
    nullable = draw.chance(0.6) if part.missing else draw.chance(0.06)
    if nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
        if style != "strict":
            schema["default"] = None
    if described:
        label = part.key.replace("_", " ")
        schema["description"] = draw.choice((f"The {label}", f"{label.capitalize()}.", f"The {label} in the text"))
    if style == "pydantic":
        schema["title"] = part.key.replace("_", " ").title()
        schema = dict(sorted(schema.items()))
    return schema


def _answer(schema: Schema, parts: list[_Part]) -> dict[str, Any]:
    properties = schema["properties"]
    return {part.key: empty(properties[part.key]) if part.missing else part.value for part in parts}


def _unsaid(parts: list[_Part]) -> tuple[str, ...]:
    return tuple(part.key for part in parts if part.missing)


def _nested(draw: Draw, kind: str, style: str, text: str, parts: list[_Part]) -> Record:
    """The last two properties in a class of their own."""
    *outer, a, b = parts
    key = draw.choice(("details", "info", "data", "extra"))
    inner = _object(draw, style, key.capitalize(), [a, b])
    inner_name = inner.pop("class")
    schema = _object(draw, style, class_name(draw, kind), outer)
    name = schema.pop("class")
    schema["required"].append(key)
    if style == "pydantic":
        schema["properties"][key] = {"$ref": f"#/$defs/{inner_name}"}
        schema = {"$defs": {inner_name: inner}, **schema}
    else:
        schema["properties"][key] = inner
    answer = {**_answer(schema, outer), key: _answer(inner, [a, b])}
    return Record(name, kind, text, schema, answer, _unsaid(parts))


def _several(draw: Draw, kind: str) -> Record:
    """A list of two to four things that have the same properties."""
    kind = "person" if kind == "thing" else kind
    fields = draw.several(_KINDS[kind], 1, 2)
    subject_key, _ = opening(draw, kind)
    keys = [draw.choice(field.names) for field in fields]
    items, said = [], []
    for _ in range(draw.integer(2, 4)):
        _, subject = opening(draw, kind)
        values = [field.make(draw) for field in fields]
        spoken = [say(draw, field, made) for field, made in zip(fields, values, strict=True)]
        said.append(sentences(draw, subject, spoken, kind))
        items.append({subject_key: subject, **dict(zip(keys, values, strict=True))})
    parts = [_Part(subject_key, dict(STRING), "", "")]
    parts += [_Part(key, dict(f.schema), "", "") for key, f in zip(keys, fields, strict=True) if key != subject_key]
    style, name = _style(draw), class_name(draw, kind)
    inner = _object(draw, style, name, parts)
    del inner["class"]
    inner = _without_nulls(inner)
    key = {"person": "people users persons", "product": "items products", "event": "events"}[kind].split()
    listed = draw.choice((*key, "items", "results", "entries"))
    outer: Schema = {"type": "object", "properties": {listed: {"type": "array", "items": inner}}, "required": [listed]}
    if style == "pydantic":
        reference = {"items": {"$ref": f"#/$defs/{name}"}, "title": listed.capitalize(), "type": "array"}
        outer = {"$defs": {name: inner}, **outer, "properties": {listed: reference}}
    return Record(f"{name}s" if draw.chance(0.5) else f"{name}List", kind, " ".join(said), outer, {listed: items})


def _without_nulls(schema: Schema) -> Schema:
    """All properties required and plain."""
    properties = {}
    for key, made in schema["properties"].items():
        plain = made["anyOf"][0] if "anyOf" in made else made
        properties[key] = {name: value for name, value in plain.items() if name != "default"}
    return {**schema, "properties": properties, "required": list(properties)}


def listing(made: Record) -> str:
    """The values as a thought lists them: `name: Ada, age: 31, pet: not said`."""
    return ", ".join(
        f"{key}: {NOT_SAID if key in made.unsaid else _listed(value)}" for key, value in _flat(made.answer)
    )


def _flat(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in answer.items():
        if isinstance(value, dict):
            pairs += _flat(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            pairs += [pair for item in value for pair in _flat(item)]
        else:
            pairs.append((key, value))
    return pairs
