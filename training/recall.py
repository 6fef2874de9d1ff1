"""Facts hidden in long texts: the answer to the question is one sentence of the text, repeated word by word."""

from collections.abc import Callable

from oscine.chat.messages import Message
from training import words
from training.episode import Effort, Episode
from training.split import Draw

NOT_SAID = "The text does not say that."
_Fact = tuple[str, str]  # the sentence that holds it, the question for it
_ATTRIBUTES = ("code", "password", "key", "number", "pin", "label", "serial number", "secret word", "price", "owner")
_PERSONAL = (
    ("phone number", lambda d: str(d.integer(1000, 9999999))),
    ("badge number", lambda d: str(d.integer(100, 99999))),
    ("locker number", lambda d: str(d.integer(1, 9999))),
    ("favourite colour", lambda d: d.choice(words.COLOURS)),
    ("favourite animal", lambda d: d.choice(words.ANIMALS)),
    ("favourite food", lambda d: d.choice(words.FOODS)),
    ("home town", words.city),
    ("best friend", words.first_name),
    ("job", lambda d: d.choice(words.JOBS)),
    ("hobby", lambda d: d.choice(words.HOBBIES)),
    ("password", lambda d: words.letters_and_digits(d, d.integer(4, 8))),
    ("birthday", lambda d: f"{d.integer(1, 28)} {d.choice(words.MONTHS)}"),
)
_SUBJECTS = (
    lambda d: words.first_name(d),
    lambda d: f"The {d.choice(words.JOBS)}",
    lambda d: f"A {d.choice(words.COLOURS)} {d.choice(words.ANIMALS)}",
    lambda d: f"The old {d.choice(words.JOBS)} from {words.city(d)}",
    lambda d: f"My neighbour {words.first_name(d)}",
    lambda d: f"The {d.choice(words.ANIMALS)}",
    lambda d: "Everybody",
    lambda d: "Nobody",
)
_PREDICATES = (
    lambda d: f"walked to the {d.choice(words.NOUNS)}",
    lambda d: f"bought some {d.choice(words.FOODS)} at the market",
    lambda d: f"looked at the {d.choice(words.COLOURS)} {d.choice(words.NOUNS)}",
    lambda d: f"talked about {d.choice(words.HOBBIES)} for hours",
    lambda d: f"was waiting near the {d.choice(words.NOUNS)}",
    lambda d: f"wrote a letter to {words.first_name(d)}",
    lambda d: f"forgot the {d.choice(words.OBJECTS)} in the {d.choice(words.NOUNS)}",
    lambda d: f"painted the {d.choice(words.NOUNS)} {d.choice(words.COLOURS)}",
    lambda d: f"took the train to {words.city(d)}",
    lambda d: f"saw {d.integer(2, 99)} {d.choice(words.ANIMALS)}s by the road",
    lambda d: f"sold the {d.choice(words.OBJECTS)} for {d.integer(2, 900)} euros",
    lambda d: "did not say a word",
    lambda d: f"dreamed of a {words.made_up(d)}",
)
_ENDINGS = (
    "",
    "",
    " in the morning",
    " after lunch",
    " because it was raining",
    " and went home",
    " before the sun set",
    " while the others slept",
    " as always",
    " on a cold day",
    " without any hurry",
)
_SCHEDULED = ("train", "meeting", "bus", "lesson", "party", "concert", "film")
_ASKS = (
    "{text}\n\n{question}",
    "{text}\n\nQuestion: {question}",
    "Read this text:\n{text}\n\n{question}",
    "Here is a text.\n\n{text}\n\nNow tell me: {question}",
    "{text} {question}",
    "{question}\n\n{text}",
    "Answer with the text below. {question}\n\n{text}",
)
_REMEMBER = (
    "Remember this: {text}",
    "Please read this:\n{text}",
    "{text}",
    "I will ask you about this text.\n\n{text}",
)
_NOTED = "I have read it. What would you like to know?"


def recall(draw: Draw, effort: Effort, num_words: int | None = None) -> Episode:
    """A text of about `num_words` words (by default 20 to 2,600) and a question about one fact in it."""
    if num_words is None:
        num_words = int(20 * 130 ** draw.rng.random())
    facts = _facts(draw, max(1, min(draw.integer(1, 40), num_words // 12)))
    hidden = not draw.held_out and draw.chance(0.08)
    sentence, question = facts.pop() if hidden and len(facts) > 1 else draw.choice(facts)
    answer = sentence if any(sentence == fact for fact, _ in facts) else NOT_SAID
    facts = [fact for fact in facts if fact[0] == sentence or not _answers(fact[0], question)]
    text = _text(draw, facts, num_words, question)
    return _lay_out(draw, effort, text, facts, (answer, question))


def _answers(sentence: str, question: str) -> bool:
    """Whether a sentence about a deed would answer a question for one. Such a sentence must not stand beside the right
    one."""
    for opening in ("Who ", "What do we know about "):
        if question.startswith(opening):
            return question.removeprefix(opening).rstrip("?").lower() in sentence.lower()
    return False


def filler(draw: Draw) -> str:
    return f"{draw.choice(_SUBJECTS)(draw)} {draw.choice(_PREDICATES)(draw)}{draw.choice(_ENDINGS)}."


def _facts(draw: Draw, count: int) -> list[_Fact]:
    """Facts with different questions; often all of one kind, so that they distract from one another."""
    kinds: list[Callable[[Draw], _Fact]] = [
        _object_fact,
        _object_fact,
        _personal_fact,
        _residence,
        _key_value,
        _deed,
        _timetable,
    ]
    if draw.chance(0.6):
        kinds = [draw.choice(kinds)]
    by_question: dict[str, str] = {}
    for _ in range(count):
        sentence, question = draw.choice(kinds)(draw)
        by_question.setdefault(question, sentence)
    facts = [(sentence, question) for question, sentence in by_question.items()]
    draw.rng.shuffle(facts)
    return facts


def _object_fact(draw: Draw) -> _Fact:
    noun = draw.choice(words.NOUNS) if draw.chance(0.8) else words.made_up(draw)
    thing = draw.make(
        "key", lambda: f"{draw.choice(words.COLOURS)} {noun}" if draw.chance(0.7) else f"{noun} in {words.city(draw)}"
    )
    attribute = draw.choice(_ATTRIBUTES)
    kind = draw.rng.random()
    if attribute == "owner":
        value = words.full_name(draw)
    elif attribute == "secret word" or kind < 0.15:
        value = words.made_up(draw)
    elif kind < 0.35:
        value = words.letters_and_digits(draw, draw.integer(4, 9))
    else:
        value = str(draw.integer(10, 10 ** draw.integer(3, 7)))
    link = draw.choice(("for", "of"))
    return f"The {attribute} {link} the {thing} is {value}.", f"What is the {attribute} {link} the {thing}?"


def _personal_fact(draw: Draw) -> _Fact:
    name = words.first_name(draw)
    attribute, make = draw.choice(_PERSONAL)
    return f"{name}'s {attribute} is {make(draw)}.", f"What is {name}'s {attribute}?"


def _residence(draw: Draw) -> _Fact:
    name = words.first_name(draw)
    if draw.chance(0.5):
        return f"{name} lives in {words.city(draw)}.", f"Where does {name} live?"
    return f"{name} works as a {draw.choice(words.JOBS)}.", f"What does {name} work as?"


def _key_value(draw: Draw) -> _Fact:
    key = draw.make("key", lambda: words.made_up(draw, 1, 3))
    value = draw.choice((str(draw.integer(0, 99999)), words.letters_and_digits(draw, 6), words.made_up(draw)))
    return f"The value of {key} is {value}.", f"What is the value of {key}?"


def _deed(draw: Draw) -> _Fact:
    """A deed of a person, in the words of the filler."""
    subject = words.first_name(draw) if draw.chance(0.7) else f"The {draw.choice(words.JOBS)}"
    predicate = draw.choice(_PREDICATES)(draw)
    sentence = f"{subject} {predicate}{draw.choice(_ENDINGS)}."
    subject = subject[0].lower() + subject[1:] if subject.startswith("The ") else subject
    if draw.chance(0.5) and predicate.startswith(("walked", "bought", "looked", "painted", "wrote", "sold", "took")):
        return sentence, f"Who {predicate}?"
    return sentence, f"What do we know about {subject}?"


def _timetable(draw: Draw) -> _Fact:
    thing = f"{draw.choice(words.HOBBIES + words.COLOURS)} {draw.choice(_SCHEDULED)}"
    verb = draw.choice(("start", "begin", "end", "leave", "arrive"))
    where = draw.choice(
        (f" in {words.city(draw)}", f" in room {draw.integer(1, 400)}", f" at the {draw.choice(words.NOUNS)}", "")
    )
    when = draw.choice(
        (f"at {words.clock_time(draw)}", f"on {draw.choice(words.WEEKDAYS)}", f"at {draw.integer(1, 12)} pm")
    )
    return f"The {thing} {verb}s {when}{where}.", f"When does the {thing} {verb}?"


def _text(draw: Draw, facts: list[_Fact], num_words: int, question: str) -> str:
    """The facts, at random places among filler that does not answer the question."""
    sentences = [filler(draw) for _ in range(max(0, (num_words - 9 * len(facts)) // 9))]
    sentences = [sentence for sentence in sentences if not _answers(sentence, question)]
    for sentence, _ in facts:
        sentences.insert(draw.integer(0, len(sentences)), sentence)
    if draw.chance(0.3):
        return "\n".join(sentences)
    return " ".join(sentences)


def _lay_out(draw: Draw, effort: Effort, text: str, facts: list[_Fact], asked: _Fact) -> Episode:
    """Puts text and question into one message, two turns or the developer's instructions."""
    answer, question = asked
    final = Message("assistant", answer, reasoning=_thought(effort, answer, question))
    if draw.chance(0.5):
        form = _ASKS[draw.integer(0, 4)] if draw.chance(0.85) else draw.choice(_ASKS[5:])
        return Episode("recall", (Message("user", form.format(text=text, question=question)), final))
    earlier = [part for fact in draw.several(facts, 0, 5) for part in _said(fact)]
    if draw.chance(0.3):
        return Episode("recall", (*earlier, Message("user", question), final), instructions=text, context_weight=0.5)
    given = draw.choice(_REMEMBER).format(text=text)
    opening = [Message("user", given), Message("assistant", _NOTED, reasoning=None if effort == "low" else _READING)]
    return Episode("recall", (*opening, *earlier, Message("user", question), final), context_weight=0.5)


_READING = "The user gives me a text. I read it and wait for the question."


def _said(fact: _Fact) -> list[Message]:
    return [Message("user", fact[1]), Message("assistant", fact[0])]


def _thought(effort: Effort, answer: str, question: str) -> str | None:
    if effort == "low":
        return None
    found = "I look for it, but the text does not say it." if answer == NOT_SAID else f'The text says: "{answer}"'
    return f"The question is: {question} {found}" if effort == "high" else found
