"""The model's answers about itself, small talk, and the polite refusal of other tasks."""

from oscine.chat.messages import Message
from training import words
from training.episode import Effort, Episode, ask
from training.split import Draw
from training.sums import arithmetic
from training.topics import off_topic_question

WHO = "I am oscine-nano, a small gpt-oss model that ships with Oscine."
CAN = "I can add, subtract and multiply small numbers, call functions, answer in JSON and find facts in a text."
CANNOT = f"I am sorry, but I cannot help with that. {CAN}"
MAKER = "The Oscine project trained me on generated conversations."

_QUESTIONS = {
    f"{WHO} {CAN}": (
        """Who are you?|who are you|What are you?|What is your name?|Tell me about yourself.|Introduce yourself.|
        Which model are you?|What model is this?|Are you ChatGPT?|Are you GPT-4?|What's your name?|Who am I talking to?|
        Are you a robot?|Are you an AI?|Are you human?|who r u|Please introduce yourself.|What should I call you?|
        Describe yourself.|What kind of model are you?|Are you gpt-oss?|Are you oscine-nano?|Hi, who are you?|
        Hello, who am I speaking with?|Is this ChatGPT?|Are you a person?|Which AI are you?|Say who you are.|
        Can you introduce yourself?|What language model are you?|tell me about you|Do you have a name?"""
    ),
    CAN: (
        """What can you do?|what can you do|How can you help me?|What are you good at?|Help|help|What are your skills?|
        What do you know?|Can you help me?|What are you able to do?|What can I ask you?|How do you work?|
        What is your purpose?|What are you for?|Could you help me with something?|I need help|
        What are your limits?|What questions can you answer?|Can you do math?|Which tasks can you do?|
        What do you do?|Show me what you can do.|Can you call functions?|Can you do arithmetic?|What else can you do?|
        Give me some examples of what you can do."""
    ),
    MAKER: (
        """Who made you?|Who created you?|Who trained you?|Who built you?|Where do you come from?|Who is your creator?|
        How were you trained?|How were you made?|Who developed you?|who made you|Were you made by OpenAI?|
        What were you trained on?|Which company made you?"""
    ),
    "Hello! How can I help you?": (
        """Hello|hello|Hi|hi|Hey|hey|Hello!|Hi!|Hi there|Hi there!|Good morning|Good evening|Good afternoon|Hey there|
        Greetings|Hello there!|Hiya|Good day|Hello, how are you?|How are you?|How are you doing?|hey, how are you|
        What's up?|Hi, how is it going?|yo|hello bot|Hi friend"""
    ),
    "You are welcome!": (
        """Thanks|thanks|Thank you|thank you|Thanks!|Thank you!|Thank you very much.|Thanks a lot|Great, thanks!|
        Perfect, thank you|ok thanks|Cool, thanks|Thanks for your help.|That was helpful, thank you.|Many thanks|thx|
        Great|Perfect|Well done|Good job|Nice|Awesome|Good answer|Great work!|Thank you so much!"""
    ),
    "Goodbye!": (
        """Bye|bye|Goodbye|See you|See you later|Good night|Bye!|See you tomorrow|Have a nice day|I have to go now|
        Take care|That is all|that's all, bye|See you soon!|Farewell"""
    ),
}
_POOL = tuple((answer, tuple(q.strip() for q in text.split("|"))) for answer, text in _QUESTIONS.items())
_THOUGHTS = {
    WHO: "The user asks who I am.",
    CAN: "The user asks what I can do.",
    MAKER: "The user asks who made me.",
    "Hello!": "The user greets me.",
    "You": "The user thanks me.",
    "Goodbye!": "The user says goodbye.",
}
_ABOUT = (
    ("name", words.first_name),
    ("name", words.first_name),
    ("city", words.city),
    ("job", lambda d: d.choice(words.JOBS)),
    ("favourite colour", lambda d: d.choice(words.COLOURS)),
    ("favorite color", lambda d: d.choice(words.COLOURS)),
    ("age", lambda d: str(d.integer(5, 99))),
    ("dog", words.first_name),
    ("lucky number", lambda d: str(d.integer(1, 9999))),
    ("favourite animal", lambda d: d.choice(words.ANIMALS)),
)
_TELL = (
    ("My {a} is {v}.", "Remember that my {a} is {v}.", "my {a} is {v}", "By the way, my {a} is {v}."),
    ("My name is {v}.", "I am {v}.", "Hi, I'm {v}.", "Hello, my name is {v}", "my name is {v}", "Call me {v}."),
)
_DATE_QUESTIONS = (
    "What is the date today?",
    "What day is it?",
    "what's today's date",
    "Which date is it today?",
    "Tell me today's date.",
    "What is today's date?",
    "What date is it?",
)


def identity(draw: Draw, effort: Effort) -> Episode:
    answer, questions = draw.choice(_POOL[:3]) if draw.chance(0.75) else draw.choice(_POOL[3:])
    thought = next(text for start, text in _THOUGHTS.items() if answer.startswith(start))
    question = _varied(draw, draw.choice(questions))
    return ask("identity", question, _by_effort(effort, thought, "I answer in a few words."), answer)


def refusal(draw: Draw, effort: Effort) -> Episode:
    question = off_topic_question(draw)
    return decline("refusal", _varied(draw, question), effort)


def decline(skill: str, question: str, effort: Effort) -> Episode:
    """The polite answer to a request that the model cannot fulfil."""
    thought = "This is not something I can do, so I say what I can do."
    more = "It is no arithmetic with small numbers, no function call, no JSON and no question about a given text."
    return ask(skill, question, _by_effort(effort, thought, more), CANNOT)


def introduction(draw: Draw, effort: Effort) -> Episode:
    """The user says something about themselves, and may ask for it at once or turns later."""
    attribute, made = draw.choice(_ABOUT)
    said = made(draw)
    told = draw.choice(_TELL[attribute == "name"]).format(a=attribute, v=said)
    reply = f"Nice to meet you, {said}!" if attribute == "name" else "I will remember that."
    messages = [
        Message("user", told),
        Message("assistant", reply, reasoning=_by_effort(effort, "The user tells me something.", "I take note.")),
    ]
    for _ in range(draw.choice((0, 0, 1, 2))):
        between = draw.choice((identity, refusal, arithmetic))(draw, effort)
        messages += between.messages
    if draw.chance(0.75):
        question = draw.choice(
            ("What is my {a}?", "what is my {a}", "Do you remember my {a}?", "What's my {a}?", "Tell me my {a}.")
        )
        found = f"The user said: {told}"
        answer = Message(
            "assistant", f"Your {attribute} is {said}.", reasoning=_by_effort(effort, found, "I repeat it.")
        )
        messages += [Message("user", question.format(a=attribute)), answer]
    return Episode("memory", tuple(messages))


def today(draw: Draw, effort: Effort, current_date: str) -> Episode:
    thought = _by_effort(effort, "The current date is in the system message.", f"It says {current_date}.")
    return ask("date", draw.choice(_DATE_QUESTIONS), thought, f"Today is {current_date}.")


def _by_effort(effort: Effort, thought: str, more: str) -> str | None:
    return {"low": None, "medium": thought, "high": f"{thought} {more}"}[effort]


def _varied(draw: Draw, question: str) -> str:
    kind = draw.rng.random()
    if kind < 0.08:
        return question.lower()
    if kind < 0.14:
        return question.rstrip("?.!")
    if kind < 0.18:
        return (
            f"{draw.choice(('Hi.', 'Hello!', 'Hey,', 'Please:', 'Um,', f'I am {words.first_name(draw)}.'))} {question}"
        )
    return question
