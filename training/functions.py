"""The functions that generated conversations offer: names, parameters and the questions that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oscine.chat.messages import FunctionTool
from training import words
from training.split import Draw

Value = str | int | float | bool
STRING, INTEGER, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]
    schema: dict[str, Any]
    make: Callable[[Draw], Value]
    description: str = ""
    extra: str = ""  # optional: the words that ask for it, added to the question; {} is the value


@dataclass(frozen=True)
class Kind:
    """A family of functions: `verbs` x `nouns` name them, `forms` ask for them with {0}, {1}, ... as the values."""

    verbs: str
    nouns: str
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    forms: tuple[str, ...]
    results: tuple[str, ...]  # keys of what it returns


@dataclass(frozen=True)
class Function:
    """One function made from a kind, with a question for it and the call that the question asks for."""

    tool: FunctionTool
    question: str
    arguments: dict[str, Value]
    results: tuple[str, ...]
    purpose: str  # no two functions on offer share it


def enum(*options: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(options)}


def _of(pool: tuple[str, ...]) -> Callable[[Draw], str]:
    return lambda draw: draw.choice(pool)


def _between(low: int, high: int) -> Callable[[Draw], int]:
    return lambda draw: draw.integer(low, high)


def _amount(draw: Draw) -> int | float:
    return draw.integer(1, 5000) if draw.chance(0.7) else draw.integer(1, 999) + draw.choice((0.5, 0.25, 0.75, 0.99))


def _days(draw: Draw) -> int:
    return draw.integer(1, 10)


def _expression(draw: Draw) -> str:
    terms = [str(draw.integer(1, 10 ** draw.integer(1, 5))) for _ in range(draw.integer(2, 4))]
    operators = [draw.choice((" + ", " - ", " * ", " / ", "+", "-", "*", "/")) for _ in terms]
    return "".join(part for pair in zip(terms, [*operators[:-1], ""], strict=True) for part in pair)


_UNITS = ("celsius", "fahrenheit")
_LEVELS = ("low", "normal", "high")
_LIGHTS = ("on", "off")
_CITY = Parameter(
    ("city", "location", "location", "place", "town", "where", "city_name"), STRING, words.place, "Name of the city"
)
_PERSON = Parameter(("name", "person", "contact", "recipient", "to"), STRING, words.first_name, "Who it is for")
_TEXT = Parameter(("text", "message", "body", "content"), STRING, words.phrase, "What to write")
_QUERY = Parameter(("query", "q", "keywords", "search_term"), STRING, words.phrase, "What to look for")
_DATE = Parameter(("date", "day"), STRING, words.date, "The date, YYYY-MM-DD")
_TIME = Parameter(("time", "at", "start_time"), STRING, words.clock_time, "Time of day")
_FROM = Parameter(("from", "from_currency", "source"), STRING, _of(words.CURRENCIES), "Currency to convert from")
_TO = Parameter(("to_currency", "target", "into"), STRING, _of(words.CURRENCIES), "Currency to convert to")
_MONEY = Parameter(("amount", "value", "sum"), NUMBER, _amount, "How much")
_LANGUAGE = Parameter(("language", "target_language", "lang"), STRING, _of(words.LANGUAGES))
_UNIT = Parameter(("unit", "units", "scale"), enum(*_UNITS), _of(_UNITS), "Unit of the temperature", " in {}")
_NUM_DAYS = Parameter(("days", "num_days"), INTEGER, _days, "Number of days", " for the next {} days")
_LIMIT = Parameter(("limit", "max_results", "count"), INTEGER, _between(1, 20), "How many", " and show {} results")
_PRIORITY = Parameter(("priority", "importance"), enum(*_LEVELS), _of(_LEVELS), "", " with {} priority")

KINDS = (
    Kind(
        "get fetch check lookup show current",
        "weather current_weather forecast weather_report temperature",
        ("Get the weather in a city.", "Current weather", "Returns the weather for a location."),
        (_CITY, _UNIT, _NUM_DAYS),
        (
            "What is the weather in {0}?",
            "What's the weather like in {0}",
            "How is the weather in {0}",
            "Tell me the weather in {0}",
            "weather in {0}",
            "Is it raining in {0}",
            "How warm is it in {0}",
            "Check the weather for {0}",
            "What is the temperature in {0}",
            "I am going to {0}. What is the weather there",
            "What is the weather like in {0} today?",
            "What's the weather in {0} right now?",
            "How is the weather in {0} today?",
            "What is the current temperature in {0}?",
            "Can you tell me the weather in {0}?",
            "Do I need an umbrella in {0}?",
            "Will it be cold in {0}",
            "{0} weather",
            "Is it sunny in {0} now?",
        ),
        ("temperature", "sky", "wind"),
    ),
    Kind(
        "get find fetch local",
        "time timezone current_time local_time clock",
        ("Get the local time of a city.", "Time in a city", "Looks up the time zone."),
        (_CITY,),
        (
            "What time is it in {0}?",
            "What is the local time in {0}?",
            "Which time zone is {0} in?",
            "time in {0}",
            "How late is it in {0}?",
        ),
        ("time", "zone"),
    ),
    Kind(
        "convert exchange change",
        "currency money amount",
        ("Convert money between currencies.", "Currency conversion", "Exchange an amount."),
        (_MONEY, _FROM, _TO),
        (
            "Convert {0} {1} to {2}.",
            "How much is {0} {1} in {2}?",
            "What are {0} {1} in {2}?",
            "Change {0} {1} into {2}",
            "I have {0} {1}. How many {2} is that?",
        ),
        ("result", "rate"),
    ),
    Kind(
        "create add set new make",
        "reminder alarm task todo note",
        ("Create a reminder.", "Sets a reminder for later.", "Adds a task with a time."),
        (Parameter(("title", "text", "what", "label"), STRING, words.phrase, "What to do"), _TIME, _PRIORITY),
        (
            "Remind me to {0} at {1}",
            "Set a reminder: {0} at {1}",
            "Please remind me at {1} to {0}",
            "Make a note to {0} at {1}",
        ),
        ("status", "id"),
    ),
    Kind(
        "create add schedule book plan",
        "event meeting appointment calendar_entry",
        ("Create a calendar event.", "Puts a meeting into the calendar."),
        (_PERSON, _DATE, _TIME),
        (
            "Schedule a meeting with {0} on {1} at {2}.",
            "Book an appointment with {0} for {1}, {2}.",
            "Plan a meeting with {0} on {1} at {2}",
        ),
        ("status", "id"),
    ),
    Kind(
        "search find web query lookup",
        "web internet documents files products search",
        ("Search for something.", "Full text search", "Finds documents that match."),
        (_QUERY, _LIMIT),
        ("Search for {0}", "Find {0}", "Look up {0}", "Please search for {0}", "Can you find {0}"),
        ("hits", "best"),
    ),
    Kind(
        "send write post",
        "message email sms mail chat",
        ("Send a message to someone.", "Sends a text.", "Writes to a contact."),
        (_PERSON, _TEXT),
        (
            "Send {0} a message: {1}",
            "Write to {0}: {1}",
            "Tell {0} this: {1}",
            "Message {0} saying {1}",
            "Send the message '{1}' to {0}.",
        ),
        ("status", "id"),
    ),
    Kind(
        "translate convert",
        "text sentence phrase words",
        ("Translate a text.", "Translates into another language."),
        (_TEXT, _LANGUAGE),
        ("Translate '{0}' into {1}.", "How do you say '{0}' in {1}?", "What is '{0}' in {1}?", "Put '{0}' into {1}"),
        ("translation",),
    ),
    Kind(
        "book reserve order find",
        "table restaurant dinner seats",
        ("Book a table in a restaurant.", "Reserve seats"),
        (
            Parameter(("city", "place", "where"), STRING, words.city),
            Parameter(("guests", "people", "party_size", "seats"), INTEGER, _between(1, 12), "Number of people"),
            _TIME,
        ),
        (
            "Book a table in {0} for {1} people at {2}.",
            "Reserve a table for {1} in {0} at {2}",
            "I need a table in {0} for {1} guests at {2}.",
        ),
        ("status", "code"),
    ),
    Kind(
        "find search get book list",
        "flights trains trip connection route tickets",
        ("Find a connection between two cities.", "Search flights", "Books a trip."),
        (
            Parameter(("origin", "from_city", "start", "departure"), STRING, words.city),
            Parameter(("destination", "to_city", "end", "arrival"), STRING, words.city),
            Parameter(("date", "day"), STRING, words.date, "", " on {}"),
        ),
        (
            "Find a flight from {0} to {1}",
            "How do I get from {0} to {1}",
            "I want to go from {0} to {1}",
            "Book a trip from {0} to {1}",
            "Show connections from {0} to {1}",
        ),
        ("departure", "price"),
    ),
    Kind(
        "get lookup find stock",
        "price stock_price quote item_price",
        ("Get the price of a product.", "Price lookup"),
        (
            Parameter(
                ("item", "product", "name", "article"),
                STRING,
                lambda d: f"{d.choice(words.COLOURS)} {d.choice(words.OBJECTS)}",
            ),
        ),
        ("How much is the {0}?", "What is the price of the {0}?", "What does the {0} cost?", "price of {0}"),
        ("price", "stock"),
    ),
    Kind(
        "order buy add purchase",
        "item product article to_cart",
        ("Order a product.", "Puts something into the cart."),
        (
            Parameter(("item", "product", "name"), STRING, _of(words.FOODS + words.OBJECTS)),
            Parameter(("quantity", "count", "number", "amount"), INTEGER, _between(2, 99)),
            Parameter(("express", "urgent"), BOOLEAN, lambda d: True, "Fast delivery", ", express please"),
        ),
        ("Order {1} {0}", "Buy {1} {0}", "I want {1} {0}", "Please get me {1} {0}", "Add {1} {0} to my cart"),
        ("total", "id"),
    ),
    Kind(
        "set switch turn control",
        "light lamp heating device room_light",
        ("Switch a device in a room.", "Controls the lights."),
        (
            Parameter(("room", "place", "where"), STRING, _of(words.NOUNS)),
            Parameter(("state", "mode", "power"), enum(*_LIGHTS), _of(_LIGHTS)),
        ),
        (
            "Turn {1} the light in the {0}.",
            "Switch the {0} {1}.",
            "Turn the lamp in the {0} {1}",
            "Lights {1} in the {0}",
        ),
        ("status",),
    ),
    Kind(
        "play start queue",
        "music song playlist media",
        ("Play music.", "Starts a song."),
        (
            Parameter(("artist", "by", "singer"), STRING, words.full_name),
            Parameter(("volume", "loudness"), INTEGER, _between(1, 100), "Volume in percent", " at volume {}"),
        ),
        ("Play music by {0}", "Play something by {0}", "I want to hear {0}", "Put on a song by {0}"),
        ("song", "status"),
    ),
    Kind(
        "get find lookup read",
        "user customer account contact employee profile",
        ("Look up a person.", "Returns the data of a customer."),
        (Parameter(("name", "user", "full_name", "customer"), STRING, words.full_name),),
        (
            "Who is {0}?",
            "Find the account of {0}.",
            "Look up {0}.",
            "Get the contact data of {0}",
            "Show me the profile of {0}",
        ),
        ("email", "phone"),
    ),
    Kind(
        "get track check find",
        "order parcel package shipment delivery ticket",
        ("Track an order by its number.", "Status of a parcel"),
        (Parameter(("id", "order_id", "number", "order_number"), INTEGER, _between(100, 999999)),),
        ("Where is my order {0}?", "Track parcel {0}.", "What is the status of order {0}?", "Check order number {0}"),
        ("status", "city"),
    ),
    Kind(
        "calculate compute divide",
        "division ratio quotient percentage power",
        ("Calculate with two numbers.", "Calculator"),
        (
            Parameter(("a", "x", "first", "left"), NUMBER, _amount),
            Parameter(("b", "y", "second", "right"), NUMBER, _amount),
        ),
        ("What is {0} divided by {1}?", "Divide {0} by {1}.", "Calculate {0} / {1}", "Compute {0} over {1}"),
        ("result",),
    ),
    Kind(
        "run use evaluate",
        "calculator calc expression",
        ("Evaluate an expression.", "A calculator"),
        (Parameter(("expression", "formula", "input", "query"), STRING, _expression),),
        (
            "Use the calculator for {0}",
            "Calculate {0} with the calculator.",
            "Ask the calculator: {0}",
            "Evaluate {0} with the tool",
        ),
        ("result",),
    ),
)
# What these do is never asked in a question that no function answers.
UNRELATED = tuple(kind for kind in KINDS if kind.results[0] in ("status", "total"))
_VERBS = "load open close start stop list update delete move copy merge scan lock sync pack sort count paint clean watch run".split()
_SYNTHETIC = (
    (STRING, words.city),
    (STRING, words.first_name),
    (STRING, lambda d: words.made_up(d)),
    (STRING, lambda d: words.letters_and_digits(d, d.integer(4, 8))),
    (STRING, words.date),
    (INTEGER, _between(0, 9999)),
    (NUMBER, _amount),
    (BOOLEAN, lambda d: d.chance(0.5)),
    (enum(*_LEVELS), _of(_LEVELS)),
    (enum(*words.COLOURS[:4]), _of(words.COLOURS[:4])),
)
_KEYS = "name city id color size mode level target source group owner region label path speed depth user kind zone tag".split()


def make_function(draw: Draw, kinds: tuple[Kind, ...] = KINDS) -> Function:
    """A function of one of the kinds (the first one is asked for most), or one that nobody has seen before."""
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
    """What a function says it does, in many wordings."""
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
    """A made-up name and made-up parameters; the question names what it wants."""
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
