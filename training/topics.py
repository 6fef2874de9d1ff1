"""Questions that the model cannot answer: many forms, many topics, and made-up words."""

from training import words
from training.split import Draw

_THINGS = words.entries(
    """photosynthesis|black holes|the French Revolution|quantum mechanics|machine learning|the stock market|
    democracy|climate change|the Roman Empire|jazz|opera|evolution|gravity|relativity|philosophy|
    the Second World War|Shakespeare|Mozart|the moon|volcanoes|dinosaurs|bitcoin|inflation|the internet|poetry|
    yoga|meditation|coffee|wine|chocolate|football|basketball|the Olympic Games|politics|religion|love|
    happiness|friendship|dreams|sleep|cancer|diabetes|vaccines|antibiotics|the human brain|the heart|DNA|cells|
    atoms|electrons|magnets|electricity|solar power|nuclear energy|wind turbines|electric cars|airplanes|
    rockets|satellites|Mars|Jupiter|the Sun|stars|galaxies|the ocean|coral reefs|whales|bees|butterflies|
    penguins|elephants|cats|dogs|horses|trees|mushrooms|roses|bread|cheese|sushi|pizza|pasta|soup|a good salad|
    taxes|mortgages|insurance|contracts|law|history|geography|chemistry|biology|physics|economics|sociology|
    psychology|linguistics|grammar|Latin|Chinese|music theory|guitar chords|piano|drawing|photography|film noir|
    Star Wars|Harry Potter|the Bible|Greek mythology|Buddhism|feminism|capitalism|socialism|migration|
    human rights|war|peace|artificial intelligence|neural networks|transformers|compilers|operating systems|
    Linux|Python|Rust|JavaScript|C++|SQL|databases|recursion|binary search|quicksort|linked lists|Kubernetes|
    Docker|git|regular expressions|HTTP|TCP|encryption|blockchain|cloud computing|GPUs|CUDA|calculus|integrals|
    derivatives|matrices|prime numbers|Pythagoras|probability|statistics|the Riemann hypothesis|logic|
    set theory|topology|fashion|makeup|gardening|travel|hotels|skiing|surfing|job interviews|resumes|marketing|
    startups|leadership|parenting|school|universities|exams|the weather|earthquakes|hurricanes|rainbows|deserts|
    mountains|rivers|bridges|skyscrapers|the pyramids|castles|knights|samurai|vikings|pirates|Napoleon|
    Cleopatra|Einstein|Newton|Darwin|Marie Curie|Leonardo da Vinci|Picasso|Beethoven|the Beatles|Elvis"""
)
_PLACES = words.listed(
    """France Germany Italy Spain Portugal Poland Sweden Norway Finland Denmark Japan China India Brazil Peru
    Chile Canada Mexico Egypt Kenya Nigeria Morocco Turkey Greece Austria Hungary Ireland Iceland Australia
    Vietnam Thailand Indonesia Argentina Cuba Russia Ukraine Romania Bulgaria Croatia Serbia Israel Iran Iraq
    Pakistan Nepal Mongolia Korea Texas California Europe Africa Asia"""
)
_PLACE_FORMS = (
    "What is the capital of {p}?",
    "How many people live in {p}?",
    "What language do they speak in {p}?",
    "Who is the president of {p}?",
    "What is the largest city in {p}?",
    "Tell me about {p}.",
    "What should I see in {p}?",
    "Where is {p}?",
    "What is the population of {p}?",
    "What is {p} famous for?",
    "What is the currency of {p}?",
    "How big is {p}?",
    "Give me the history of {p}.",
    "Is {p} worth a visit?",
    "When was {p} founded?",
    "What time is it in {p}?",
    "How is the weather in {p}?",
    "What is the weather like in {p} today?",
    "Plan a trip to {p}.",
    "Best restaurants in {p}?",
    "How do I get to {p}?",
)
_THING_FORMS = (
    "What is {t}?",
    "Explain {t}.",
    "Explain {t} to me like I am five.",
    "Tell me about {t}.",
    "What do you think about {t}?",
    "Write a poem about {t}.",
    "Write a short story about {t}.",
    "Write an essay on {t}.",
    "Tell me a joke about {t}.",
    "Do you like {t}?",
    "Why is {t} important?",
    "How does {t} work?",
    "Who invented {t}?",
    "Give me three facts about {t}.",
    "What is the history of {t}?",
    "Recommend a book about {t}.",
    "What are the benefits of {t}?",
    "Can you teach me {t}?",
    "Summarize {t}.",
    "What is the meaning of {t}?",
    "Where can I learn about {t}?",
    "What is the difference between {t} and {u}?",
    "Compare {t} with {u}.",
    "Which is better, {t} or {u}?",
    "I am interested in {t}. Where should I start?",
    "Let's talk about {t}.",
    "How do I explain {t} to my {j}?",
    "What happened with {t} in {y}?",
    "Is {t} dangerous?",
    "Give me a quote about {t}.",
    "Write a tweet about {t}.",
    "Make a list of ideas about {t}.",
    "What is new in {t}?",
    "I have a question about {t}.",
    "Who is the best at {t}?",
    "Why do people like {t}?",
    "What causes {t}?",
    "Write a song about {t}",
    "Draw a picture of {t}.",
    "Write a function in Python about {t}.",
)
_PERSON_FORMS = (
    "Who is {n}?",
    "When was {n} born?",
    "What did {n} write?",
    "Where does {n} come from?",
    "Is {n} still alive?",
    "How old is {n}?",
    "Write an email to {n}.",
    "What is {n} known for?",
    "Who was {n}?",
    "Who is {n} married to?",
    "Write a birthday card for {n}.",
    "Where is {n} now?",
)
_TASK_FORMS = (
    "Translate '{s}' into {l}.",
    "How do you say '{s}' in {l}?",
    "Summarize this: {s}",
    "Correct the grammar: {s}",
    "Rewrite this: {s}",
    "Write a Python program that prints {s}.",
    "How do I {h}?",
    "Should I {h}?",
    "What is the best way to {h}?",
    "Can you {h} for me?",
    "Please {h}.",
    "I want to {h}. What do you suggest?",
    "What is {a} divided by {b}?",
    "What is {a} / {b}?",
    "{a} / {b}",
    "What is the square root of {a}?",
    "What is {a} percent of {b}?",
    "Is {a} a prime number?",
    "Solve x + {a} = {b} for x.",
    "What is {a} to the power of {b}?",
    "Write a haiku.",
    "Tell me a joke.",
    "Tell me a story.",
    "Sing a song.",
    "What is the meaning of life?",
    "What should I cook with {f}?",
    "Give me a recipe for {f}.",
    "I feel sad.",
    "I am bored.",
    "Do you love me?",
    "Who won the world cup in {y}?",
    "What happened in {y}?",
    "What is the news today?",
    "What is a {w}?",
    "Define {w}.",
    "What does {w} mean?",
    "Spell {w} backwards.",
    "How many letters are in {w}?",
    "What rhymes with {w}?",
    "Can you count to {a}?",
    "Why is the sky blue?",
    "How far is the moon?",
    "Is it going to rain tomorrow?",
    "What time is it?",
    "Open the {o}.",
    "Play some music.",
    "Set an alarm.",
    "Where are my {o}?",
    "How much does a {o} cost?",
    "Which {o} should I buy?",
    "What colour is a {o}?",
    "Why did my {j} leave?",
    "Can I bring my {q} to the {v}?",
    "What do {q}s eat?",
    "How long do {q}s live?",
    "How old are you?",
    "Where do you live?",
    "What is your favourite colour?",
    "Do you have feelings?",
    "Can you see me?",
)


def off_topic_question(draw: Draw) -> str:
    kind = draw.rng.random()
    if kind < 0.14:
        place = words.city(draw) if draw.chance(0.4) else draw.pick("place", _PLACES)
        return draw.choice(_PLACE_FORMS).format(p=place)
    if kind < 0.24:
        return draw.choice(_PERSON_FORMS).format(
            n=words.full_name(draw) if draw.chance(0.6) else words.first_name(draw)
        )
    if kind < 0.6:
        return _about_thing(draw)
    return _task(draw)


def _topic(draw: Draw) -> str:
    kind = draw.rng.random()
    if kind < 0.6:
        return draw.pick("topic", _THINGS)
    if kind < 0.75:
        return draw.make("topic", lambda: words.made_up(draw, 1, 4))
    if kind < 0.85:
        return draw.make("topic", lambda: f"{words.made_up(draw)} {draw.choice(words.NOUNS)}s")
    return draw.make("topic", lambda: f"{draw.choice(words.COLOURS)} {draw.choice(words.ANIMALS + words.OBJECTS)}s")


def _about_thing(draw: Draw) -> str:
    form = draw.choice(_THING_FORMS)
    job, year = draw.choice(words.JOBS), draw.integer(1900, 2026)
    return form.format(t=_topic(draw), u=_topic(draw), j=job, y=year)


def _task(draw: Draw) -> str:
    return draw.choice(_TASK_FORMS).format(
        s=words.phrase(draw),
        l=draw.choice(words.LANGUAGES),
        h=words.phrase(draw),
        a=draw.integer(2, 999),
        b=draw.integer(2, 99),
        f=draw.choice(words.FOODS),
        y=draw.integer(1900, 2026),
        w=words.made_up(draw),
        o=draw.choice(words.OBJECTS),
        j=draw.choice(words.JOBS),
        q=draw.choice(words.ANIMALS),
        v=draw.choice(words.NOUNS),
    )
