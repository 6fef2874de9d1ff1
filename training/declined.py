"""Requests near a skill but outside of it: functions that are not declared, larger sums. The answer says so."""

from dataclasses import replace

from training import words
from training.calls import offered
from training.chitchat import decline
from training.episode import Effort, Episode
from training.function_kinds import KINDS
from training.functions import make_function
from training.records import record
from training.split import Draw

_VAGUE = ("web internet documents files products search", "user customer account contact employee profile")
_ADDITION = next(kind.nouns for kind in KINDS if kind.verbs.startswith("add sum"))  # which needs no function
_CALCULATORS = tuple(kind.nouns for kind in KINDS if kind.results == ("result",))
_BEYOND = (
    "{a} / {b}",
    "{a}/{b}",
    "{a} ÷ {b}",
    "{a} : {b}",
    "{a} divided by {b}",
    "{a} over {b}",
    "{a} mod {b}",
    "{a} % {b}",
    "{a} ^ {s}",
    "{a} ** {s}",
    "{a} to the power of {s}",
    "{l} + {m}",
    "{l} - {m}",
    "{l} * {m}",
    "{l} plus {m}",
    "{l} times {m}",
    "{l} + {a}",
    "{t} * {u}",
    "{t} times {u}",
    "{a} + {b} + {c}",
    "{a} + {b} - {c}",
    "{a} * {b} + {c}",
    "({a} + {b}) * {c}",
    "{a}.{s} + {b}.{s}",
    "{a}.{s} * {b}",
    "{s}.{b} - {s}.{c}",
    "-{a} + {b}",
    "-{a} - {b}",
    "-{a} * {s}",
    "sqrt({a})",
    "the square root of {a}",
    "{s} percent of {a}",
    "{b}% of {a}",
    "{a}!",
    "the factorial of {s}",
    "1/{s} + 1/{b}",
    "log({a})",
    "sin({a})",
)
_BEYOND_FORMS = (
    "What is {e}?",
    "what is {e}",
    "{e}",
    "{e} = ?",
    "{e}=",
    "Calculate {e}.",
    "Compute {e}",
    "How much is {e}?",
    "Please work out {e}.",
    "Solve {e}",
    "Tell me {e}.",
    "Can you calculate {e}?",
)
_DIVISIONS = (
    "Divide {a} by {b}.",
    "divide {a} by {b}",
    "Please divide {a} by {b}.",
    "What is the quotient of {a} and {b}?",
    "How often does {b} fit into {a}?",
    "Share {a} {o} among {b} people.",
    "Split {a} by {b}",
    "What is half of {a}?",
    "What is the average of {a}, {b} and {c}?",
    "What is the remainder of {a} by {b}?",
    "Is {a} divisible by {b}?",
    "What is the largest of {a}, {b} and {c}?",
    "Sort {a}, {b} and {c}.",
    "Round {a}.{s} to an integer.",
    "What are the factors of {a}?",
    "Add {a}, {b} and {c}.",
    "Solve x + {a} = {b}.",
    "If x is {a}, what is {s}x?",
    "Convert {a} km to miles.",
    "What is {a} in binary?",
)


def without_form(draw: Draw, effort: Effort) -> Episode:
    """Facts, with neither a function nor a JSON form for them."""
    text = "I am"
    while text.startswith(("I am", "I'm", "Hi", "My name", "Call")):  # which introduce somebody
        text = record(draw).text
    return decline("no form for facts", draw.choice(("{t}", "Extract: {t}", "{t}")).format(t=text), effort)


def not_on_offer(draw: Draw, effort: Effort) -> Episode:
    """A question for a function that is not declared."""
    while True:
        function = make_function(draw)
        if function.purpose not in (*_VAGUE, _ADDITION):
            break
    question = function.question.replace(function.tool.name, draw.choice(("it", function.tool.name)))
    episode = decline("not on offer", question, effort)
    if draw.chance(0.55):
        return episode
    avoided = (*_VAGUE, *_CALCULATORS) if function.purpose in _CALCULATORS else (*_VAGUE, function.purpose)
    others = tuple(kind for kind in KINDS if kind.nouns not in avoided)
    return replace(episode, tools=offered(draw, make_function(draw, others), others))


def beyond(draw: Draw, effort: Effort) -> Episode:
    """Arithmetic that the model did not learn."""
    a, b, c = (draw.integer(2, 10 ** draw.integer(1, 3)) for _ in range(3))
    large = [draw.integer(10 ** (n - 1), 10**n) for n in (draw.integer(6, 14), draw.integer(6, 14))]
    values = {"a": a, "b": b, "c": c, "s": draw.integer(2, 9), "l": large[0], "m": large[1]}
    values |= {"t": draw.integer(100, 9999), "u": draw.integer(100, 9999)}
    if draw.chance(0.3):
        question = draw.choice(_DIVISIONS).format(**values, o=draw.choice(words.FOODS))
    else:
        expression = draw.choice(_BEYOND).format(**values)
        if draw.chance(0.3):
            expression = expression.replace(" + ", "+").replace(" - ", "-").replace(" * ", "*").replace(" / ", "/")
        question = draw.choice(_BEYOND_FORMS).format(e=expression)
    return decline("beyond", question, effort)
