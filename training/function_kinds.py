"""The families of functions in generated conversations: their names, parameters and the questions that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    results: tuple[str, ...]  # keys of its result


def enum(*options: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(options)}


def one_of(pool: tuple[str, ...]) -> Callable[[Draw], str]:
    return lambda draw: draw.choice(pool)


def between(low: int, high: int) -> Callable[[Draw], int]:
    return lambda draw: draw.integer(low, high)


def amount(draw: Draw) -> int | float:
    return draw.integer(1, 5000) if draw.chance(0.7) else draw.integer(1, 999) + draw.choice((0.5, 0.25, 0.75, 0.99))


def _days(draw: Draw) -> int:
    return draw.integer(1, 10)


def _expression(draw: Draw) -> str:
    terms = [str(draw.integer(1, 10 ** draw.integer(1, 5))) for _ in range(draw.integer(2, 4))]
    operators = [draw.choice((" + ", " - ", " * ", " / ", "+", "-", "*", "/")) for _ in terms]
    return "".join(part for pair in zip(terms, [*operators[:-1], ""], strict=True) for part in pair)


_UNITS = ("celsius", "fahrenheit")
LEVELS = ("low", "normal", "high")
_LIGHTS = ("on", "off")
_CITY = Parameter(
    ("city", "location", "location", "place", "town", "where", "city_name"), STRING, words.place, "Name of the city"
)
_PERSON = Parameter(("name", "person", "contact", "recipient", "to"), STRING, words.first_name, "Who it is for")
_TEXT = Parameter(("text", "message", "body", "content"), STRING, words.phrase, "What to write")
_QUERY = Parameter(("query", "q", "keywords", "search_term"), STRING, words.phrase, "What to look for")
_DATE = Parameter(("date", "day"), STRING, words.date, "The date, YYYY-MM-DD")
_TIME = Parameter(("time", "at", "start_time"), STRING, words.clock_time, "Time of day")
_FROM = Parameter(("from", "from_currency", "source"), STRING, one_of(words.CURRENCIES), "Currency to convert from")
_TO = Parameter(("to_currency", "target", "into"), STRING, one_of(words.CURRENCIES), "Currency to convert to")
_MONEY = Parameter(("amount", "value", "sum"), NUMBER, amount, "How much")
_LANGUAGE = Parameter(("language", "target_language", "lang"), STRING, one_of(words.LANGUAGES))
_UNIT = Parameter(("unit", "units", "scale"), enum(*_UNITS), one_of(_UNITS), "Unit of the temperature", " in {}")
_NUM_DAYS = Parameter(("days", "num_days"), INTEGER, _days, "Number of days", " for the next {} days")
_LIMIT = Parameter(("limit", "max_results", "count"), INTEGER, between(1, 20), "How many", " and show {} results")
_PRIORITY = Parameter(("priority", "importance"), enum(*LEVELS), one_of(LEVELS), "", " with {} priority")

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
            Parameter(("guests", "people", "party_size", "seats"), INTEGER, between(1, 12), "Number of people"),
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
            Parameter(("item", "product", "name"), STRING, one_of(words.FOODS + words.OBJECTS)),
            Parameter(("quantity", "count", "number", "amount"), INTEGER, between(2, 99)),
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
            Parameter(("room", "place", "where"), STRING, one_of(words.NOUNS)),
            Parameter(("state", "mode", "power"), enum(*_LIGHTS), one_of(_LIGHTS)),
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
            Parameter(("volume", "loudness"), INTEGER, between(1, 100), "Volume in percent", " at volume {}"),
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
        (Parameter(("id", "order_id", "number", "order_number"), INTEGER, between(100, 999999)),),
        ("Where is my order {0}?", "Track parcel {0}.", "What is the status of order {0}?", "Check order number {0}"),
        ("status", "city"),
    ),
    Kind(
        "calculate compute divide",
        "division ratio quotient percentage power",
        ("Calculate with two numbers.", "Calculator"),
        (
            Parameter(("a", "x", "first", "left"), NUMBER, amount),
            Parameter(("b", "y", "second", "right"), NUMBER, amount),
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
    Kind(
        "add sum plus total",
        "numbers values integers up",
        ("Add two numbers.", "Adds up", "Returns the sum of two numbers."),
        (
            Parameter(("a", "x", "first", "left"), INTEGER, between(0, 9999)),
            Parameter(("b", "y", "second", "right"), INTEGER, between(0, 9999)),
        ),
        (
            "What is {0} plus {1}?",
            "Add {0} and {1}.",
            "Use the tool to add {0} and {1}.",
            "What is {0} + {1}?",
            "{0} + {1}",
        ),
        ("result",),
    ),
)
# Questions without a function never ask for these.
UNRELATED = tuple(kind for kind in KINDS if kind.results[0] in ("status", "total"))
