"""Sums, differences and products worked out column by column, as reasoning with a length that follows the effort."""

from oscine.chat.messages import ReasoningEffort

PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands", "Hundred thousands", "Millions", "Ten millions")
RESULT = {"+": "sum", "-": "difference", "*": "product"}


def value(a: int, operator: str, b: int) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def statement(a: int, operator: str, b: int) -> str:
    return f"{a} {operator} {b} = {value(a, operator, b)}"


def reasoning(a: int, operator: str, b: int, effort: ReasoningEffort) -> str | None:
    """The steps to the result, for operands >= 0. None at low effort if no steps are needed."""
    if effort == "low":
        return None if max(a, b) < 10 else ", ".join(_short(a, operator, b))
    steps = _steps(a, operator, b)
    if effort == "high":
        task = f"The user asks for a {RESULT[operator]}. I work column by column, from the right."
        steps = [task, *steps, _check(a, operator, b)]
    return " ".join(steps)


def _digits(number: int, width: int) -> list[int]:
    """Decimal digits, ones first, padded with zeros."""
    return [number // 10**place % 10 for place in range(width)]


def _steps(a: int, operator: str, b: int) -> list[str]:
    result = value(a, operator, b)
    end = f"The {RESULT[operator]} is {result}."
    if operator == "+":
        return [f"{a} + {b}.", *_addition(a, b), end]
    if operator == "-" and a >= b:
        return [f"{a} - {b}.", *_subtraction(a, b), end]
    if operator == "-":
        flipped = [f"{a} - {b}. {a} is less than {b}, so I take {b} - {a} and negate it.", *_subtraction(b, a)]
        return [*flipped, f"{b} - {a} = {b - a}.", end]
    return [f"{a} * {b}.", *_multiplication(a, b), end]


def _addition(a: int, b: int) -> list[str]:
    steps, carry = [], 0
    width = max(len(str(a)), len(str(b)))
    for place, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        total = x + y + carry
        terms = f"{x} + {y} + 1" if carry else f"{x} + {y}"
        carry = total // 10
        wrote = f"write {total % 10}, carry 1" if carry else f"write {total}"
        steps.append(f"{PLACES[place]}: {terms} = {total}, {wrote}.")
    return [*steps, f"{PLACES[width]}: write 1."] if carry else steps


def _subtraction(a: int, b: int) -> list[str]:
    """Steps of a - b for a >= b."""
    steps, borrow = [], 0
    width = len(str(a))
    for place, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        rest = f" - {y} - 1" if borrow else f" - {y}"
        difference = x - y - borrow
        if difference < 0:
            step = f"{x}{rest} is below 0, so {x + 10}{rest} = {difference + 10}, write {difference + 10}, borrow 1."
        else:
            step = f"{x}{rest} = {difference}, write {difference}."
        borrow = int(difference < 0)
        steps.append(f"{PLACES[place]}: {step}")
    return steps


def _multiplication(a: int, b: int) -> list[str]:
    if a < 10 <= b:
        return [f"That is {b} * {a}.", *_multiplication(b, a)]
    if b < 10:
        return _times_digit(a, b)
    steps, partials = [], []
    for place, digit in enumerate(_digits(b, len(str(b)))):
        partials.append(a * digit * 10**place)
        steps += [f"{a} * {digit}:", *_times_digit(a, digit), f"{a} * {digit * 10**place} = {partials[-1]}."]
    total = partials[0]
    for partial in partials[1:]:
        steps += [f"{total} + {partial}:", *_addition(total, partial)]
        total += partial
    return steps


def _times_digit(a: int, b: int) -> list[str]:
    steps, carry = [], 0
    width = len(str(a))
    for place, x in enumerate(_digits(a, width)):
        total = x * b + carry
        terms = f"{x} * {b} = {x * b}, plus {carry} is {total}" if carry else f"{x} * {b} = {total}"
        carry = total // 10
        wrote = f"write {total % 10}, carry {carry}" if carry else f"write {total}"
        steps.append(f"{PLACES[place]}: {terms}, {wrote}.")
    return [*steps, f"{PLACES[width]}: write {carry}."] if carry else steps


def _short(a: int, operator: str, b: int) -> list[str]:
    """The bare columns, ones first."""
    if operator == "-" and a < b:
        return [f"-({b}-{a})", *_short(b, "-", a)]
    if operator == "*":
        return _short_product(a, b)
    columns, carry, width = [], 0, max(len(str(a)), len(str(b)))
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        terms = f"{operator}{y}{operator}1" if carry else f"{operator}{y}"
        total = x + y + carry if operator == "+" else x - y - carry
        if operator == "+":
            carry = total // 10
        else:
            carry = int(total < 0)
            x, total = x + 10 * carry, total + 10 * carry
        columns.append(f"{x}{terms}={total}")
    return columns


def _short_product(a: int, b: int) -> list[str]:
    if a < 10 <= b:
        return _short_product(b, a)
    if b >= 10:
        partials = [a * digit * 10**place for place, digit in enumerate(_digits(b, len(str(b))))]
        named = [f"{a}*{d}={a * d}" for d in _digits(b, len(str(b)))]
        return [*named, "+".join(map(str, partials))]
    columns, carry = [], 0
    for x in _digits(a, len(str(a))):
        total = x * b + carry
        columns.append(f"{x}*{b}+{carry}={total}" if carry else f"{x}*{b}={total}")
        carry = total // 10
    return columns


def _check(a: int, operator: str, b: int) -> str:
    result = value(a, operator, b)
    if operator == "+":
        return f"Check: {result} - {b} = {a}, which is right."
    if operator == "-":
        return f"Check: {result} + {b} = {a}, which is right."
    return f"Check: {b} * {a} = {result}, which is right."
