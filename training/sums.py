"""Questions that ask for a sum, a difference or a product, in many phrasings."""

from training.arithmetic import reasoning, statement, value
from training.episode import Effort, Episode, ask
from training.split import Draw
from training.words import FOODS, OBJECTS, first_name

SKILLS = {"+": "addition", "-": "subtraction", "*": "multiplication"}
_SIGNS = {"+": ("+",), "-": ("-",), "*": ("*", "x", "×")}
_WORDS = {"+": ("plus", "and"), "-": ("minus",), "*": ("times", "multiplied by")}
_EXPRESSION_FORMS = (
    "What is {e}?",
    "what is {e}",
    "What's {e}?",
    "whats {e}",
    "{e}",
    "{e} = ?",
    "{e}=",
    "{e}?",
    "Calculate {e}.",
    "Compute {e}",
    "How much is {e}?",
    "how much is {e}",
    "Please calculate {e}.",
    "Can you tell me what {e} is?",
    "Could you work out {e} for me?",
    "Hi! What is {e}?",
    "I need the result of {e}.",
    "Solve {e}",
    "Tell me {e}, please.",
    "Hello, what does {e} give?",
    "What do you get for {e}?",
    "Evaluate {e}.",
    "What is the result of {e}?",
    "What is the value of {e}?",
    "What does {e} equal?",
    "Quick question: {e}?",
    "Do you know what {e} is?",
    "Let me know how much {e} is.",
    "What is {e}? Thanks!",
    "Please tell me: what is {e}?",
)
_VERB_FORMS = {
    "+": (
        "Add {a} and {b}.",
        "add {a} to {b}",
        "What is the sum of {a} and {b}?",
        "Please add {a} and {b}.",
        "Find the sum of {a} and {b}.",
        "Sum {a} and {b}",
        "What do {a} and {b} add up to?",
        "What is the total of {a} and {b}?",
        "Can you add {a} and {b}?",
        "What is {b} more than {a}?",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "subtract {b} from {a}",
        "Take {b} away from {a}.",
        "What is the difference {a} minus {b}?",
        "Please subtract {b} from {a}.",
        "What is left of {a} if you take away {b}?",
        "What is {b} less than {a}?",
        "Can you subtract {b} from {a}?",
    ),
    "*": (
        "Multiply {a} by {b}.",
        "multiply {a} and {b}",
        "What is the product of {a} and {b}?",
        "Please multiply {a} by {b}.",
        "Find the product of {a} and {b}.",
        "Can you multiply {a} by {b}?",
    ),
}
_STORIES = {
    "+": (
        "{n} has {a} {o} and gets {b} more. How many {o} does {n} have now?",
        "{n} buys {a} {o} on Monday and {b} on Tuesday. How many {o} is that in total?",
        "There are {a} {o} in one box and {b} in another. How many are there together?",
        "If I have {a} {o} and you give me {b} more, how many do I have?",
    ),
    "-": (
        "{n} has {a} {o} and gives away {b}. How many {o} are left?",
        "A shop had {a} {o} and sold {b} of them. How many does it still have?",
        "{n} had {a} {o} and lost {b}. How many remain?",
        "If I have {a} {o} and I eat {b}, how many do I have left?",
    ),
    "*": (
        "There are {b} boxes with {a} {o} each. How many {o} are there?",
        "{n} buys {b} bags of {a} {o}. How many {o} is that?",
    ),
}
_PLURALS = tuple(word for word in FOODS + OBJECTS if word.endswith("s"))
_FOLLOW_UPS = {
    "+": ("Now add {b} to that.", "add {b}", "And plus {b}?", "What if you add {b} to it?", "now add {b} to that"),
    "-": ("Now subtract {b} from that.", "And minus {b}?", "Take away {b} from it.", "now subtract {b}"),
    "*": ("Now multiply that by {b}.", "And times {b}?", "multiply it by {b}"),
}


def operands(draw: Draw, operator: str, digits: int | None = None) -> tuple[int, int]:
    """Two operands of up to `digits` digits on the draw's side of the split; by default up to four, mostly three."""

    def pair() -> tuple[int, int]:
        if operator == "*":
            return _factors(draw)
        most = digits or draw.choice((1, 2, 2, 3, 3, 3, 3, 4))
        return _number(draw, most), _number(draw, most)

    return draw.make(operator, pair)


def arithmetic(draw: Draw, effort: Effort, operator: str | None = None, digits: int | None = None) -> Episode:
    operator = operator or draw.choice("+++-----**" if effort == "low" else "++++---***")  # briefly is harder for "-"
    a, b = operands(draw, operator, digits)
    return _episode(_question(draw, a, operator, b), a, operator, b, effort)


def follow_up(draw: Draw, effort: Effort, number: int) -> Episode:
    """A question that continues with the result `number` >= 0 of the turn before."""
    operator = draw.choice("++-") if number > 99 else draw.choice("++-*")
    b = draw.integer(2, 9) if operator == "*" else _number(draw, draw.choice((1, 2, 3)))
    if operator == "*" and draw.chance(0.4):
        b, question = 2, draw.choice(("Double that.", "Now double it.", "double it please"))
    else:
        question = draw.choice(_FOLLOW_UPS[operator]).format(b=b)
    return _episode(question, number, operator, b, effort)


def _episode(question: str, a: int, operator: str, b: int, effort: Effort) -> Episode:
    answer = f"{statement(a, operator, b)}."
    return ask(SKILLS[operator], question, reasoning(a, operator, b, effort), answer, number=value(a, operator, b))


def _number(draw: Draw, most: int) -> int:
    length = draw.integer(1, most) if draw.chance(0.5) else most
    return draw.integer(0 if length == 1 else 10 ** (length - 1), 10**length - 1)


def _factors(draw: Draw) -> tuple[int, int]:
    kind = draw.rng.random()
    if kind < 0.3:
        return draw.integer(0, 12), draw.integer(0, 12)
    if kind < 0.75:
        pair = (draw.integer(10, 99 if draw.chance(0.7) else 999), draw.integer(2, 9))
        return pair if draw.chance(0.6) else (pair[1], pair[0])
    return draw.integer(10, 99), draw.integer(10, 99)


def _question(draw: Draw, a: int, operator: str, b: int) -> str:
    kind = draw.rng.random()
    if kind < 0.62:
        question = draw.choice(_EXPRESSION_FORMS).format(e=_expression(draw, a, operator, b))
    elif kind < 0.86:
        question = draw.choice(_VERB_FORMS[operator]).format(a=a, b=b)
    elif operator == "-" and a < b:
        question = f"What is {a} minus {b}?"
    else:
        question = draw.choice(_STORIES[operator]).format(a=a, b=b, n=first_name(draw), o=draw.choice(_PLURALS))
    return draw.choice((question.lower(), question.rstrip("?."))) if draw.chance(0.1) else question


def _expression(draw: Draw, a: int, operator: str, b: int) -> str:
    if draw.chance(0.3):
        return f"{a} {draw.choice(_WORDS[operator])} {b}"
    sign = draw.choice(_SIGNS[operator])
    return f"{a}{sign}{b}" if draw.chance(0.35) else f"{a} {sign} {b}"
