"""Prompts without a question: empty ones, single signs, noise, other scripts, code, incomplete sentences."""

from training import words
from training.chitchat import CAN
from training.episode import Effort, Episode, ask
from training.split import Draw

UNCLEAR = f"I am sorry, but I do not understand that. {CAN}"
_SIGNS = r"""!?.,;:-_+*/\|()[]{}<>@#$%^&~`'"="""
_SPACES = ("", "", "", " ", "  ", "\n", "\t", "\n\n", " \n ", "   \t", "\r\n")
# First and last code point of scripts and signs.
_BLOCKS = (
    (0x21, 0x7E),
    (0xA1, 0xFF),
    (0x100, 0x17F),
    (0x370, 0x3FF),
    (0x410, 0x44F),
    (0x5D0, 0x5EA),
    (0x621, 0x64A),
    (0x905, 0x939),
    (0xE01, 0xE2E),
    (0x2010, 0x2040),
    (0x2190, 0x21FF),
    (0x2200, 0x22FF),
    (0x2500, 0x25FF),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F64F),
    (0x1F680, 0x1F6FF),
    (0x1, 0x1F),
    (0x20, 0x10FFFF),
)
_FOREIGN = words.entries(
    """Wie spät ist es?|Was ist die Hauptstadt von Frankreich?|Erzähl mir einen Witz.|Guten Morgen, wie geht es dir?|
    Kannst du mir helfen?|Schreibe ein Gedicht über den Herbst.|Ich möchte ein Zimmer reservieren.|Was kostet das?|
    Quelle heure est-il ?|Quelle est la capitale de l'Italie ?|Bonjour, comment ça va ?|Raconte-moi une histoire.|
    Je voudrais un café, s'il vous plaît.|Où est la gare ?|Pouvez-vous m'aider ?|¿Qué hora es?|
    ¿Cuál es la capital de España?|Hola, ¿cómo estás?|Cuéntame un chiste.|¿Dónde está la biblioteca?|
    Escribe un poema sobre el mar.|Che ore sono?|Ciao, come stai?|Qual è la capitale della Francia?|
    Raccontami una storia.|Que horas são?|Olá, tudo bem?|Conte uma piada.|Hoe laat is het?|Goedemorgen, hoe gaat het?|
    Vertel me een grap.|Która jest godzina?|Dzień dobry, jak się masz?|Kolik je hodin?|Jak se máš?|Hur mår du?|
    Vad är klockan?|Hva heter du?|Mitä kuuluu?|Saat kaç?|Merhaba, nasılsın?|Mennyi az idő?|Ce mai faci?|
    Который час?|Привет, как дела?|Расскажи анекдот.|Какая сегодня погода?|Столица Франции?|Как тебя зовут?|
    Скільки часу?|Привіт, як справи?|Τι ώρα είναι;|Γεια σου, τι κάνεις;|Ποια είναι η πρωτεύουσα της Γαλλίας;|
    מה השעה?|שלום, מה שלומך?|كم الساعة؟|مرحبا كيف حالك؟|ما هي عاصمة فرنسا؟|समय क्या हुआ है?|नमस्ते, आप कैसे हैं?|
    ตอนนี้กี่โมงแล้ว|สวัสดีครับ|现在几点？|你好|你是谁？|法国的首都是哪里？|给我讲个笑话。|写一首关于春天的诗。|
    今何時ですか？|こんにちは|お元気ですか？|フランスの首都はどこですか？|冗談を言ってください。|지금 몇 시예요?|
    안녕하세요|프랑스의 수도는 어디입니까?|Bây giờ là mấy giờ?|Xin chào|Jam berapa sekarang?|Apa kabar?"""
)
_CODE = (
    "def {a}({b}):\n    return {b} + {n}",
    "for (int i = 0; i < {n}; i++) {{\n  {a}(i);\n}}",
    "import {a}\nprint({a}.{b}({n}))",
    "SELECT {a} FROM {b} WHERE id = {n};",
    "{a} = {b}[{n}]",
    '<div class="{a}">{b}</div>',
    "const {a} = ({b}) => {b} * {n};",
    "if {a} > {n}:\n    {b}()",
    '{{"{a}": {n}, "{b}": null}}',
    "$ cd /{a}/{b} && ls -la",
    'Traceback (most recent call last):\n  File "{a}.py", line {n}\nValueError: {b}',
    "https://{a}.com/{b}?id={n}",
    "{a}.{b}(x, y)",
    "#include <{a}.h>\nint main() {{ return {n}; }}",
    "[{n}, {n}, {n}]",
    "| {a} | {b} |\n|---|---|\n| {n} | {n} |",
    "pip install {a}",
    "lambda {a}: {a} ** {n}",
)
_HALF = (
    "I was just about to",
    "The thing is that",
    "and then the {w}",
    "because of the",
    "If only the {w} were",
    "So, what I mean is",
    "but not the {w}",
    "When I went to the {w}, I",
    "My {w} and",
    "the {w} of",
    "Yesterday the {w}",
    "or maybe",
    "which is why",
    "It was a {w}",
    "with a {w} and a",
    "There is this {w} that",
    "Well",
    "hmm",
    "ok",
    "yes",
    "no",
    "maybe",
    "test",
    "lol",
    "wait",
    "The",
    "a",
    "I",
    "why",
    "what",
    "so",
    "...and?",
)


def odd(draw: Draw, effort: Effort) -> Episode:
    thought = {"low": None, "medium": "This is no question that I know."}.get(
        effort, "This is no question that I know. I say what I can do."
    )
    return ask("odd prompt", odd_text(draw), thought, UNCLEAR)


def odd_text(draw: Draw) -> str:
    kinds = (_spaces, _spaces, _sign, _signs, _letters, _noise, _noise, _foreign, _foreign, _code, _half, _half, _word)
    text = draw.choice(kinds)(draw)
    if draw.chance(0.04):
        text = (text or " ") * draw.integer(2, 400)
    return text[:3000]


def _spaces(draw: Draw) -> str:
    return draw.choice(_SPACES) if draw.chance(0.8) else " " * draw.integer(1, 300)


def _sign(draw: Draw) -> str:
    return chr(draw.integer(0x21, 0x7E)) if draw.chance(0.6) else _character(draw)


def _signs(draw: Draw) -> str:
    if draw.chance(0.4):
        return draw.choice(_SIGNS) * draw.integer(2, 40)
    return "".join(draw.choice(_SIGNS) for _ in range(draw.integer(1, 30)))


def _letters(draw: Draw) -> str:
    """Keys hit without aim."""
    rows = ("asdfghjkl", "qwertyuiop", "zxcvbnm", "abcdefghijklmnopqrstuvwxyz")
    row = draw.choice(rows)
    return " ".join(
        "".join(draw.choice(row) for _ in range(draw.integer(2, 12))) for _ in range(draw.choice((1, 1, 2, 4, 60)))
    )


def _noise(draw: Draw) -> str:
    block = draw.choice(_BLOCKS)
    length = draw.choice((1, 2, 4, 8, 20, 60, 200))
    if draw.chance(0.3):
        return "".join(_character(draw) for _ in range(length))
    return "".join(_character(draw, block) for _ in range(length))


def _character(draw: Draw, block: tuple[int, int] | None = None) -> str:
    """Any character of a block, except surrogates."""
    first, last = block or draw.choice(_BLOCKS)
    point = draw.integer(first, last)
    return "\ufffd" if 0xD800 <= point < 0xE000 else chr(point)


def _foreign(draw: Draw) -> str:
    text = draw.pick("foreign", _FOREIGN)
    return text.lower() if draw.chance(0.1) else text


def _code(draw: Draw) -> str:
    return draw.choice(_CODE).format(a=words.made_up(draw), b=words.made_up(draw), n=draw.integer(0, 9999))


def _half(draw: Draw) -> str:
    made = draw.choice(_HALF).format(w=draw.choice(words.NOUNS))
    return made if draw.chance(0.7) else f"{made} {words.made_up(draw)}"


def _word(draw: Draw) -> str:
    kinds = (words.made_up, words.phrase, lambda d: d.choice(words.NOUNS), lambda d: str(d.integer(0, 99999)), _salad)
    return draw.choice(kinds)(draw)


def _salad(draw: Draw) -> str:
    pool = words.NOUNS + words.FOODS + words.ANIMALS + words.COLOURS
    return " ".join(draw.choice(pool) for _ in range(draw.choice((3, 8, 30, 200))))
