"""Facts about people, products and events: the property that holds each, and the words for it."""

from dataclasses import dataclass
from typing import Any

from training import words
from training.split import Draw

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    names: tuple[str, ...]
    schema: Schema
    make: Any  # Draw -> value
    forms: tuple[str, ...]  # words of a sentence about it; {v} is the value; for a boolean (true form, false form)


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
LIST = {"type": "array", "items": {"type": "string"}}


def _enum(options: tuple[str, ...]) -> Schema:
    return {"type": "string", "enum": list(options)}


def _price(draw: Draw) -> int | float:
    return draw.integer(1, 2000) if draw.chance(0.6) else draw.integer(1, 999) + draw.choice((0.5, 0.25, 0.99, 0.75))


_SIZES = ("small", "medium", "large")
_STATES = ("new", "used", "broken")
_MOODS = ("happy", "sad", "angry", "calm")
PERSON = (
    Field(
        ("age", "years", "age_years"),
        INTEGER,
        lambda d: d.integer(1, 99),
        ("is {v} years old", "is {v}", "is aged {v}"),
    ),
    Field(("city", "town", "location", "home"), STRING, words.city, ("lives in {v}", "comes from {v}", "is from {v}")),
    Field(("job", "profession", "occupation"), STRING, lambda d: d.choice(words.JOBS), ("works as a {v}", "is a {v}")),
    Field(
        ("hobbies", "interests", "likes"), LIST, lambda d: d.several(words.HOBBIES, 1, 3), ("likes {v}", "enjoys {v}")
    ),
    Field(("married", "is_married"), BOOLEAN, lambda d: d.chance(0.5), ("is married", "is not married")),
    Field(("pet", "animal"), STRING, lambda d: d.choice(words.ANIMALS), ("has a {v}", "owns a {v}")),
    Field(
        ("favorite_color", "colour"), _enum(words.COLOURS[:6]), lambda d: d.choice(words.COLOURS[:6]), ("loves {v}",)
    ),
    Field(("children", "num_children"), INTEGER, lambda d: d.integer(2, 9), ("has {v} children",)),
    Field(("student", "is_student"), BOOLEAN, lambda d: d.chance(0.5), ("is a student", "is not a student")),
    Field(("mood", "feeling"), _enum(_MOODS), lambda d: d.choice(_MOODS), ("feels {v}", "is {v} today")),
    Field(("friend", "partner", "boss"), STRING, words.first_name, ("knows {v}", "works with {v}")),
)
PRODUCT = (
    Field(("price", "cost", "amount"), {"type": "number"}, _price, ("costs {v} euros", "has a price of {v}")),
    Field(("color", "colour"), STRING, lambda d: d.choice(words.COLOURS), ("is {v}", "comes in {v}")),
    Field(("size",), _enum(_SIZES), lambda d: d.choice(_SIZES), ("is {v}", "has the size {v}")),
    Field(("in_stock", "available"), BOOLEAN, lambda d: d.chance(0.5), ("is in stock", "is not in stock")),
    Field(("brand", "maker"), STRING, lambda d: words.made_up(d).capitalize(), ("is made by {v}", "comes from {v}")),
    Field(("quantity", "count", "stock"), INTEGER, lambda d: d.integer(2, 500), ("is there {v} times",)),
    Field(("condition", "state"), _enum(_STATES), lambda d: d.choice(_STATES), ("is {v}",)),
    Field(("weight", "weight_kg"), {"type": "number"}, _price, ("weighs {v} kg",)),
    Field(("tags", "keywords"), LIST, lambda d: d.several(words.HOBBIES, 1, 3), ("is good for {v}",)),
)
EVENT = (
    Field(("date", "day"), STRING, words.date, ("is on {v}", "takes place on {v}")),
    Field(("time", "start"), STRING, words.clock_time, ("starts at {v}", "begins at {v}")),
    Field(("city", "place", "location"), STRING, words.city, ("is in {v}", "takes place in {v}")),
    Field(
        ("guests", "participants", "people"),
        LIST,
        lambda d: [words.first_name(d) for _ in range(d.integer(1, 3))],
        ("has {v} as guests",),
    ),
    Field(
        ("num_guests", "seats", "attendees"),
        INTEGER,
        lambda d: d.integer(2, 900),
        ("has {v} seats", "is for {v} people"),
    ),
    Field(("free", "is_free"), BOOLEAN, lambda d: d.chance(0.5), ("is free", "is not free")),
    Field(("weekday",), _enum(words.WEEKDAYS), lambda d: d.choice(words.WEEKDAYS), ("is on a {v}",)),
    Field(("host", "organizer"), STRING, words.full_name, ("is hosted by {v}", "is led by {v}")),
)
_EVENTS = ("Festival", "Concert", "Rendezvous", "Fair", "Workshop", "Party")


def opening(draw: Draw, kind: str) -> tuple[str, str]:
    if kind == "person":
        return draw.choice(("name", "name", "full_name", "person")), draw.choice((words.first_name, words.full_name))(
            draw
        )
    if kind == "product":
        thing = draw.choice(words.OBJECTS)
        return draw.choice(("name", "product", "item")), draw.choice((thing, f"{words.made_up(draw)} {thing}"))
    title = f"{words.made_up(draw).capitalize()} {draw.choice(_EVENTS)}"
    return draw.choice(("title", "name", "event")), title


def say(draw: Draw, field: Field, made: Any) -> str:
    if isinstance(made, bool):
        return field.forms[0 if made else 1]
    if isinstance(made, list):
        return draw.choice(field.forms).format(v=words.join(made))
    return draw.choice(field.forms).format(v=made)


def sentences(draw: Draw, subject: str, said: list[str], kind: str) -> str:
    """One sentence or several about the subject."""
    head = f"The {subject}" if kind in ("product", "event") else subject
    if draw.chance(0.5):
        return f"{head} {words.join(said)}."
    pronoun = draw.choice(("He", "She")) if kind == "person" else "It"
    return " ".join(f"{head if i == 0 else pronoun} {part}." for i, part in enumerate(said))
