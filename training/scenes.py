"""Sentences with several facts each: meetings, films, invoices, reviews; and the values of a class for them."""

from typing import Any, NamedTuple

from training import words
from training.fields import INTEGER, LIST, STRING, Schema
from training.function_kinds import NUMBER, enum
from training.split import Draw


class Fact(NamedTuple):
    key: str
    schema: Schema
    value: Any


class Scene(NamedTuple):
    names: str  # of classes that fit
    about: str
    text: str
    facts: list[Fact]


_DAYS = (*words.WEEKDAYS, "tomorrow", "the first of May", "the 14th")
_NATIONS = words.entries(
    """France|Germany|Italy|Spain|Portugal|Poland|Japan|Brazil|Canada|Kenya|Norway|Sweden|Finland|Denmark|Austria|Greece|
    Turkey|Egypt|India|China|Mexico|Chile|Peru|Cuba|Ireland|Iceland|the United Kingdom|United Kingdom|New Zealand|
    South Korea|South Africa|the Netherlands|United States|Saudi Arabia|Costa Rica|USA|UK"""
)
_GOOD = words.listed("great wonderful excellent perfect amazing fantastic lovely brilliant superb nice")
_BAD = words.listed("terrible awful horrible bad useless broken ugly poor disappointing slow")
_PLAIN = words.listed("okay average ordinary normal usual acceptable")
_URGENT = ("this is important!", "it is urgent", "as soon as possible", "very important", "urgent!", "top priority")
_CALM = ("no hurry", "whenever you have time", "not important", "it can wait", "low priority")


def scene(draw: Draw) -> Scene:
    return draw.choice(_SCENES)(draw)


def _key(draw: Draw, keys: str) -> str:
    return draw.choice(keys.split())


def _names(draw: Draw, low: int, high: int) -> list[str]:
    return list(dict.fromkeys(words.first_name(draw) for _ in range(draw.integer(low, high))))


def _title(draw: Draw) -> str:
    made = draw.choice(
        (words.made_up(draw), draw.choice(words.NOUNS), f"{draw.choice(words.COLOURS)} {draw.choice(words.ANIMALS)}")
    )
    made = " ".join(part.capitalize() for part in made.split())
    return f"The {made}" if draw.chance(0.5) else made


def _meeting(draw: Draw) -> Scene:
    people, day = _names(draw, 1, 3), draw.choice(_DAYS)
    topic = draw.choice(
        (words.phrase(draw), draw.choice(words.HOBBIES), f"the {draw.choice(words.NOUNS)}", "the budget")
    )
    forms = (
        "{p} meet on {d} to talk about {t}.",
        "Rendezvous with {p} on {d} about {t}.",
        "On {d} {p} will discuss {t}.",
        "{p} have a call on {d}. The topic is {t}.",
        "Please plan a meeting about {t} with {p} for {d}.",
        "{d}: {t} with {p}",
    )
    text = draw.choice(forms).format(p=words.join(people), d=day, t=topic)
    facts = [
        Fact(_key(draw, "attendees participants people members who"), LIST, people),
        Fact(_key(draw, "topic subject title about agenda"), STRING, topic),
        Fact(_key(draw, "date day when"), STRING, day),
    ]
    return Scene("Rendezvous MeetingInfo Appointment CalendarEvent Call Event", "meeting", text, facts)


def _work(draw: Draw) -> Scene:
    title, year, maker = _title(draw), draw.integer(1900, 2029), words.full_name(draw)
    kind, verb, key = draw.choice(
        (
            ("film", "directed", "director"),
            ("movie", "directed", "director"),
            ("book", "written", "author"),
            ("song", "written", "artist"),
            ("painting", "made", "artist"),
        )
    )
    forms = (
        "{t} is a {y} {k} {v} by {n}.",
        "The {y} {k} {t} was {v} by {n}.",
        "{t} is a {k} by {n} from {y}.",
        "{t}, a {k} of {y}, was {v} by {n}.",
        "{t} ({y}) by {n}",
        "My favourite {k} is {t} by {n}. It is from {y}.",
    )
    text = draw.choice(forms).format(t=title, y=year, n=maker, k=kind, v=verb)
    facts = [
        Fact(_key(draw, f"title title name {kind}"), STRING, title),
        Fact(_key(draw, "year year release_year published"), INTEGER, year),
        Fact(draw.choice((key, "creator", "made_by")), STRING, maker),
    ]
    return Scene(f"{kind.capitalize()} {kind.capitalize()}Info Work Title", kind, text, facts)


def _place(draw: Draw) -> Scene:
    city = words.city(draw)
    country = words.made_up(draw).capitalize() if draw.chance(0.3) else draw.choice(_NATIONS)
    forms = (
        "{c} is in {n}.",
        "{c} is a city in {n}.",
        "{c} is the capital of {n}.",
        "The {y} games were held in {c}, {n}.",
        "I live in {c} in {n}.",
        "{c}, {n}",
        "We went to {c} in {n} last year.",
        "The fair of {y} takes place in {c}, {n}.",
    )
    text = draw.choice(forms).format(c=city, n=country, y=draw.integer(1900, 2029))
    facts = [
        Fact(_key(draw, "city city city_name town name"), STRING, city),
        Fact(_key(draw, "country country nation state"), STRING, country),
    ]
    return Scene("CityLocation Location City Place Address", "place", text, facts)


def _invoice(draw: Draw) -> Scene:
    number = (
        f"{draw.choice('ABCDEFGHKM')}-{draw.integer(1, 999)}" if draw.chance(0.7) else str(draw.integer(100, 99999))
    )
    customer = draw.choice((words.first_name, words.full_name, lambda d: d.choice(words.LAST_NAMES)))(draw)
    total = draw.integer(5, 2000) + draw.choice((0, 0.5, 0.25, 0.99))
    bought = [
        (draw.integer(2, 30), thing if thing.endswith("s") else f"{thing}s")
        for thing in draw.several(words.OBJECTS, 1, 3)
    ]
    listed = words.join([f"{count} {thing}" for count, thing in bought])
    forms = (
        "Invoice {i} for {c}: {l}, total {t} euros.",
        "Order {i} by {c}: {l}. Total: {t}",
        "{c} bought {l} for {t} euros. The invoice number is {i}.",
        "Receipt {i}. Customer {c}, {l}, {t} euros in total.",
    )
    text = draw.choice(forms).format(i=number, c=customer, l=listed, t=total)
    name, count = _key(draw, "name name item product"), _key(draw, "quantity quantity count number")
    item = {"type": "object", "properties": {name: STRING, count: INTEGER}, "required": [name, count]}
    facts = [
        Fact(_key(draw, "number id invoice_number reference order_id"), STRING, number),
        Fact(_key(draw, "customer client buyer customer_name"), STRING, customer),
        Fact(_key(draw, "total amount total_price"), NUMBER, total),
        Fact(
            _key(draw, "items items lines products line_items"),
            {"type": "array", "items": item},
            [{name: thing, count: number} for number, thing in bought],
        ),
    ]
    return Scene("Invoice Order Receipt Purchase InvoiceData", "invoice", text, facts)


def _todo(draw: Draw) -> Scene:
    heads = ("buy", "find", "call", "send", "clean", "paint", "repair", "visit", "order", "check", "bring", "water")
    thing = draw.choice(words.FOODS + words.OBJECTS + words.NOUNS)
    task = f"{draw.choice(heads)} {draw.choice(('', 'the ', 'some '))}{thing}"
    when = draw.choice(("tomorrow", "today", "tonight", "next week", f"on {draw.choice(words.WEEKDAYS)}"))
    level = draw.choice(("high", "low"))
    cue = draw.choice(_URGENT if level == "high" else _CALM)
    task = task.capitalize() if draw.chance(0.4) else task
    forms = ("{t} {w}, {c}", "{t} {w}. {c}", "{t} {w} - {c}", "I have to {t} {w}, {c}", "todo: {t} {w}, {c}")
    facts = [
        Fact(_key(draw, "title task what name text"), STRING, task),
        Fact(_key(draw, "due when due_date deadline"), STRING, when),
        Fact(
            _key(draw, "priority importance urgency"),
            enum(*draw.choice((("low", "high"), ("low", "medium", "high")))),
            level,
        ),
    ]
    text = draw.choice(forms).format(t=task, w=when, c=cue)
    return Scene("Task Todo TodoItem Note Reminder", "task", text, facts)


def _address(draw: Draw) -> Scene:
    name, city = words.full_name(draw) if draw.chance(0.5) else words.first_name(draw), words.city(draw)
    road = draw.choice(("Main", "Oak", words.made_up(draw).capitalize()))
    street = f"{draw.integer(1, 200)} {road} {draw.choice(('Street', 'Road', 'Avenue', 'Lane'))}"
    code = str(draw.integer(10000, 99999))
    coded = draw.chance(0.4)
    forms = ("{n} lives at {s} in {c}.", "{n}, {s}, {c}", "{n} has moved to {s}, {c}.", "Send it to {n}, {s}, {c}.")
    text = draw.choice(forms).format(n=name, s=street, c=f"{code} {city}" if coded else city)
    inner = {_key(draw, "street street_address line"): street, _key(draw, "city town"): city}
    if coded:
        inner[_key(draw, "zip zip_code postal_code")] = code
    schema: Schema = {"type": "object", "properties": dict.fromkeys(inner, STRING), "required": [*inner]}
    whole = [Fact("address" if draw.chance(0.8) else "home", schema, inner)]
    if draw.chance(0.3):
        whole = [Fact(key, STRING, value) for key, value in inner.items()]
    return Scene(
        "Person Customer Contact Resident Recipient",
        "person",
        text,
        [Fact(_key(draw, "name name full_name recipient"), STRING, name), *whole],
    )


def _review(draw: Draw) -> Scene:
    thing = draw.choice(words.OBJECTS + words.NOUNS)
    label = draw.choice(("positive", "negative", "neutral"))
    word = draw.choice({"positive": _GOOD, "negative": _BAD, "neutral": _PLAIN}[label])
    forms = {
        "positive": (
            "I love this {t}, it is {w}!",
            "What a {w} {t}!",
            "The {t} is {w}. I am very happy.",
            "{w} {t}, thank you",
        ),
        "negative": (
            "I hate this {t}, it is {w}.",
            "What a {w} {t}!",
            "The {t} is {w}. I want my money back.",
            "{w} {t}, never again",
        ),
        "neutral": ("The {t} is {w}.", "It is a {w} {t}.", "This {t} is {w}, nothing special.", "{w} {t}, I think"),
    }[label]
    text = draw.choice(forms).format(t=thing, w=word)
    labels = ("positive", "negative", "neutral") if label == "neutral" or draw.chance(0.7) else ("positive", "negative")
    facts = [
        Fact(_key(draw, "sentiment sentiment label class category mood"), enum(*draw.several(labels, 3, 3)), label)
    ]
    if draw.chance(0.5):
        facts.append(Fact(_key(draw, "product item topic thing"), STRING, thing))
    return Scene("Sentiment Review Classification SentimentAnalysis Feedback", "review", text, facts)


def _portrait(draw: Draw) -> Scene:
    """One person in one sentence, sometimes in the first person."""
    name = words.full_name(draw) if draw.chance(0.3) else words.first_name(draw)
    age, job, city = draw.integer(1, 99), draw.choice(words.JOBS), words.city(draw)
    whose = draw.choice(("friend", "neighbour", "boss", "sister", "brother", "colleague", "teacher"))
    told = {"name": name, "age": age, "job": job, "city": city}
    forms = (
        "My {w} {n} turned {a} last week.",
        "My {w} {n} is {a} years old and lives in {c}.",
        "{n} just turned {a}.",
        "{n} is a {a} year old {j} from {c}.",
        "{n} is a {a}-year-old {j}.",
        "{n} ({a}) is a {j}.",
        "{n}, {a}, {j} from {c}",
        "{n}, {a}",
        "Hi, I'm {n}, I am {a} and I work as a {j} in {c}.",
        "My name is {n} and I am {a} years old.",
        "I am {n}, a {j} from {c}.",
        "I met {n} from {c}, who is {a}.",
        "The {j} {n} lives in {c} and is {a}.",
        "{n} who is {a} years old",
        "{a}-year-old {n} lives in {c}.",
        "{n} will be {a} in May.",
        "{n} is {a} and works as a {j}.",
    )
    form = draw.choice(forms)
    text = form.format(w=whose, n=name, a=age, j=job, c=city)
    keys = {
        "name": ("{n}", _key(draw, "name name name full_name person user_name"), STRING),
        "age": ("{a}", _key(draw, "age age age years"), INTEGER),
        "job": ("{j}", _key(draw, "job occupation profession"), STRING),
        "city": ("{c}", _key(draw, "city city location town"), STRING),
    }
    facts = [Fact(key, schema, told[what]) for what, (mark, key, schema) in keys.items() if mark in form]
    return Scene("User User UserInfo UserDetail Person Character Profile Contact", "person", text, facts)


def _contact(draw: Draw) -> Scene:
    name = words.first_name(draw)
    phone = f"{draw.integer(100, 999)}-{draw.integer(1000, 9999)}"
    mail = f"{name.lower()}@{words.made_up(draw)}.{draw.choice(('com', 'org', 'net'))}"
    forms = (
        "Call {n} at {p} or write to {m}.",
        "{n}: {p}, {m}",
        "You can reach {n} by mail ({m}) or phone ({p}).",
        "My name is {n}, my phone number is {p} and my email is {m}.",
        "{n}'s number is {p} and the email address is {m}.",
    )
    text = draw.choice(forms).format(n=name, p=phone, m=mail)
    facts = [
        Fact(_key(draw, "name name contact person"), STRING, name),
        Fact(_key(draw, "phone phone_number number telephone"), STRING, phone),
        Fact(_key(draw, "email email email_address mail"), STRING, mail),
    ]
    return Scene("Contact ContactInfo Person User Lead", "contact", text, facts)


def _journey(draw: Draw) -> Scene:
    start, end = words.city(draw), words.city(draw)
    day, price = draw.choice((words.date(draw), draw.choice(_DAYS))), draw.integer(20, 2000)
    way = draw.choice(("flight", "train", "bus", "trip", "ticket"))
    forms = (
        "A {w} from {s} to {e} on {d} for {p} euros.",
        "The {w} from {s} to {e} costs {p} euros. It leaves on {d}.",
        "I need a {w} from {s} to {e} on {d}, at most {p} euros.",
        "{s} to {e}, {d}, {p} euros",
    )
    text = draw.choice(forms).format(w=way, s=start, e=end, d=day, p=price)
    facts = [
        Fact(_key(draw, "origin from_city departure start"), STRING, start),
        Fact(_key(draw, "destination to_city arrival end"), STRING, end),
        Fact(_key(draw, "date day when"), STRING, day),
        Fact(_key(draw, "price cost budget max_price"), INTEGER if draw.chance(0.5) else NUMBER, price),
    ]
    return Scene("Flight Trip Journey Booking Connection Travel", "trip", text, facts)


def _group(draw: Draw) -> Scene:
    """Several people and their ages."""
    people = [(name, draw.integer(1, 99)) for name in _names(draw, 2, 4)]
    forms = ("{n} is {a}", "{n} is {a} years old", "{n} ({a})", "{n}, {a}")
    form = draw.choice(forms)
    parts = [form.format(n=name, a=age) for name, age in people]
    text = draw.choice(("; ".join, words.join, ". ".join))(parts)
    name, age = _key(draw, "name name person"), _key(draw, "age age years")
    item = {"type": "object", "properties": {name: STRING, age: INTEGER}, "required": [name, age]}
    made = [{name: who, age: years} for who, years in people]
    key = _key(draw, "users people persons items members characters")
    return Scene(
        "Users People UserList Group Team Response", "people", text, [Fact(key, {"type": "array", "items": item}, made)]
    )


_SCENES = (
    *(_portrait,) * 4,
    _meeting,
    _work,
    _place,
    _invoice,
    _todo,
    _address,
    _review,
    _contact,
    _journey,
    _group,
)
