"""Word lists of the generated conversations, and made-up words, so that copying does not depend on known words."""

from training.split import Draw


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def entries(text: str) -> tuple[str, ...]:
    """The entries between bars; line breaks count as spaces."""
    return tuple(" ".join(entry.split()) for entry in text.split("|"))


FIRST_NAMES = listed(
    """Ada Adam Agnes Ahmed Aiko Alan Albert Alex Alice Alma Amara Amir Amy Ana Anders Andrea Andrew Anika Anna
    Anton Arjun Arthur Asha Astrid Ben Bella Bernard Bianca Bjorn Bob Boris Brenda Brian Bruno Carl Carla
    Carlos Carmen Cecilia Charles Chen Chiara Chloe Clara Claude Dahlia Dan Daniel Daria David Diana Diego
    Dmitri Dora Edgar Edith Eduardo Elena Eli Elif Elisa Ella Emil Emily Emma Eric Erika Esther Eva Fatima
    Felix Fiona Flora Frank Frida Gabriel George Gina Giulia Grace Greta Gustav Hana Hanna Hans Harry Hassan
    Hector Heidi Helen Henry Hiro Hugo Ian Ibrahim Ida Igor Ines Ingrid Irene Iris Isaac Isabel Ivan Jack Jacob
    James Jane Janet Jasmin Javier Jean Jenny Jim Joan Johan John Jonas Jose Josef Joy Juan Julia Julian June
    Kai Karen Karim Karl Kate Keiko Ken Kenji Kim Klara Klaus Kofi Lara Lars Laura Lea Lena Leo Leon Lila Lily
    Linda Lisa Liam Lola Lorenzo Louis Lucas Lucia Luis Luna Magda Maja Malik Marco Maria Marie Mark Marta
    Martin Mary Mateo Matilda Max Maya Mei Mia Michael Mila Milan Mina Miriam Mohamed Mona Nadia Naomi Nathan
    Nela Nick Nicole Nils Nina Noah Nora Olaf Olga Oliver Olivia Omar Oscar Otto Pablo Paul Paula Pedro Peter
    Petra Philip Priya Rachel Rafael Ravi Rita Robert Rosa Rose Ruben Ruth Sam Samira Sandra Sara Sasha Sean
    Selma Sergei Simon Sofia Sonja Stefan Stella Sue Sven Tamara Tara Tariq Ted Teresa Theo Thomas Tim Tina
    Tobias Tom Uma Ursula Vera Victor Vikram Viola Walter Wanda Wei Wendy Will Xavier Yara Yasmin Yuki Yusuf
    Zara Zoe"""
)
LAST_NAMES = listed(
    """Adams Ahmad Andersen Bauer Becker Bell Berg Brown Carter Castro Chang Clark Costa Cruz Diaz Dubois Evans
    Fischer Flores Fontana Garcia Gomez Green Haas Hansen Harris Hill Ito Ivanov Jansen Jensen Jones Kaya
    Keller Khan King Klein Kowalski Kumar Larsen Lee Lewis Lopez Martin Mendes Meyer Miller Moore Moreau Mori
    Nagy Nielsen Novak Okafor Olsen Park Patel Perez Petrov Popov Reed Ricci Rivera Rossi Santos Sato Schmidt
    Silva Singh Smith Sousa Stone Suzuki Tanaka Taylor Torres Turner Vega Vogel Walker Weber White Wilson Wong
    Wright Yang Young Zhang Ziegler"""
)
CITIES = entries(
    """Accra|Amsterdam|Ankara|Antwerp|Athens|Atlanta|Auckland|Baghdad|Bangkok|Barcelona|Basel|Beijing|Beirut|
    Belgrade|Bergen|Berlin|Bern|Bilbao|Bogota|Bologna|Bonn|Boston|Bremen|Brisbane|Bristol|Brussels|Bucharest|
    Budapest|Buenos Aires|Busan|Cairo|Calgary|Cape Town|Caracas|Cardiff|Chicago|Cologne|Copenhagen|Cork|Dakar|
    Dallas|Delhi|Denver|Detroit|Dhaka|Doha|Dresden|Dubai|Dublin|Edinburgh|Florence|Frankfurt|Geneva|Genoa|Ghent|
    Glasgow|Granada|Graz|Hamburg|Hanoi|Havana|Helsinki|Hong Kong|Houston|Istanbul|Jakarta|Karachi|Kathmandu|
    Kyiv|Kyoto|Lagos|Lausanne|Leeds|Leipzig|Lille|Lima|Lisbon|Liverpool|London|Los Angeles|Luanda|Lyon|Madrid|
    Malaga|Malmo|Manchester|Manila|Marseille|Melbourne|Mexico City|Miami|Milan|Minsk|Montreal|Moscow|Mumbai|
    Munich|Nairobi|Nantes|Naples|New York|Nice|Odessa|Osaka|Oslo|Ottawa|Oxford|Palermo|Paris|Perth|Phoenix|Pisa|
    Porto|Prague|Quito|Reykjavik|Riga|Rio de Janeiro|Rome|Rotterdam|Salzburg|San Francisco|Santiago|Sao Paulo|
    Sarajevo|Seattle|Seoul|Seville|Shanghai|Singapore|Sofia|Split|Stockholm|Strasbourg|Sydney|Taipei|Tallinn|
    Tampere|Tehran|Tokyo|Toronto|Trieste|Tunis|Turin|Utrecht|Valencia|Vancouver|Venice|Verona|Vienna|Vilnius|
    Warsaw|Washington|Wellington|York|Zagreb|Zurich"""
)
COLOURS = listed("red blue green yellow black white orange purple brown grey pink silver golden")
NOUNS = listed(
    """door gate house box garden bridge tower boat train car bike lamp table chair window drawer cabinet locker
    room office shed barn cellar attic mill museum library school station harbour market kitchen studio
    workshop lab vault safe suitcase backpack envelope folder notebook printer server router camera phone
    laptop clock piano guitar violin drum kite tent map compass lantern ladder bucket basket barrel crate trunk
    chest jar bottle kettle teapot statue fountain well windmill lighthouse cottage castle cave island forest
    lake river hill valley field orchard greenhouse stable hotel bakery cafe theatre cinema archive warehouse
    factory airport elevator staircase balcony terrace roof"""
)
FOODS = listed(
    """apples pears bread cheese rice pasta soup salad mango grapes cherries olives honey tea coffee milk cake
    pizza fish beans onions carrots tomatoes potatoes lemons plums figs nuts eggs butter noodles pancakes"""
)
ANIMALS = listed(
    """cat dog horse owl fox bear wolf otter rabbit hedgehog sparrow eagle heron salmon whale dolphin tiger lion
    camel goat sheep cow pig duck goose swan frog turtle snake spider bee ant squirrel mouse deer"""
)
JOBS = listed(
    """teacher nurse doctor baker farmer pilot engineer painter writer lawyer chef gardener plumber driver
    carpenter singer dentist librarian programmer tailor firefighter photographer journalist architect
    electrician waiter"""
)
HOBBIES = listed(
    """chess tennis swimming hiking painting cooking reading football sailing climbing dancing singing cycling
    fishing gardening skiing running yoga knitting photography baking rowing surfing pottery"""
)
OBJECTS = listed(
    """shoes jacket hat scarf book pen lamp chair table phone laptop mouse keyboard bag watch ring umbrella bottle
    mug plate spoon knife ball racket bike helmet tent blanket pillow towel candle mirror clock vase brush
    camera printer headphones charger backpack gloves"""
)
WEEKDAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("January February March April May June July August September October November December")
CURRENCIES = listed("USD EUR GBP JPY CHF CAD AUD SEK NOK DKK PLN CZK INR BRL CNY KRW MXN ZAR TRY NZD")
LANGUAGES = listed("English French German Spanish Italian Portuguese Dutch Polish Czech Turkish Arabic Japanese Korean")
COMMON = listed(
    """language final cut knowledge system channel analysis every included string open valid reason developer extract
    from work request instruct tools these calls question always form type object subtract multiply result value product
    title asked talked sorry call color full able respond properties which hundred before old everybody nobody here
    neighbour has cannot market format explain this also after sample because morning wait other sleep lunch hurry euros
    favourite bought dream column boolean got letter live default person hours give time number children nature
    temperature use function false true friendly difference return cursor dated source weather please have script
    example animal data session information status describe like such stand currency convert location passed below look
    begin hands integer browser page would optional service favorite your follow border many parameters minus plus find
    film its conversation helpful secret fields tool array output part leaves much now get customer lines distance arch
    provide calendar need retrieve translate generated sky correct tell fully less mind null compute birthday response
    reminder relative more pattern appointment restaurant inches show write engine short answers each them how polite
    way search guests help concert schedule keep away careful think brief deer one structure doc create the a an and or
    not but with without for to of in on at by we you they it is are was were will can should good bad new first last
    big small day week year house water food money road light hand head eye story music game team world night project
    report budget plan idea problem order party holiday family friend"""
)
_ACCENTS = "éèêáàâäåæãçíîïñóôöøõúûüßšžčğıłńřşý"
_ALPHABETS = ((0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x621, 0x64A), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3))
_SYMBOLS = ((0x3041, 0x30FA), (0x1F300, 0x1F64F), (0x905, 0x939), (0x2190, 0x22FF), (0xA1, 0x17F), (0x21, 0x7E))
_ONSETS = listed("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kl kr pl pr qu sh sk st th tr y x")
_VOWELS = listed("a e i o u a e i o u ai ea ee ia io oa ou au")
_PARTS = ("Oscine", "seeds", "bourbon", "valence", "omaha", "aspen", "doha", "grace")  # of names held out
_WORDS = tuple(
    word.lower()
    for pool in (_PARTS * 8, COMMON, LAST_NAMES, COLOURS, NOUNS, FOODS, ANIMALS, JOBS, HOBBIES, OBJECTS, LANGUAGES)
    for entry in pool
    for word in entry.split()
)
_CODAS = ["", "", "", "n", "r", "s", "l", "m", "t", "k", "d", "x", "nd", "rt", "st", "ck", "ng"]


def made_up(draw: Draw, low: int = 2, high: int = 3) -> str:
    """A made-up lower-case word of low .. high syllables, or of pieces of real words.

    Through the pieces, every token of the vocabulary is copied in training.
    """
    if draw.chance(0.35):
        return "".join(_piece(draw) for _ in range(draw.integer(1, high)))
    parts = [draw.choice(_ONSETS) + draw.choice(_VOWELS) for _ in range(draw.integer(low, high))]
    return "".join(parts) + draw.choice(_CODAS)


def _piece(draw: Draw) -> str:
    """Two to seven letters of a known word."""
    word = draw.choice(_WORDS)
    start = draw.integer(0, max(0, len(word) - 2))
    return word[start : start + draw.integer(2, 7)]


def first_name(draw: Draw) -> str:
    kind = draw.rng.random()
    if kind < 0.3:
        return draw.make("name", lambda: made_up(draw).capitalize())
    if kind < 0.32:
        return draw.make("name", lambda: _accented(draw, made_up(draw)).capitalize())
    return draw.pick("name", FIRST_NAMES)


def _accented(draw: Draw, word: str) -> str:
    at = draw.integer(1, len(word) - 1)
    return f"{word[:at]}{draw.choice(_ACCENTS)}{word[at + 1 :]}"


def full_name(draw: Draw) -> str:
    last = made_up(draw).capitalize() if draw.chance(0.3) else draw.choice(LAST_NAMES)
    return f"{first_name(draw)} {last}"


def city(draw: Draw) -> str:
    if draw.chance(0.35):
        return draw.make("city", lambda: made_up(draw).capitalize())
    return draw.pick("city", CITIES)


_COUNTRIES = (
    "France",
    "Germany",
    "Italy",
    "Spain",
    "Portugal",
    "Poland",
    "Japan",
    "Brazil",
    "Canada",
    "Kenya",
    "USA",
    "UK",
)


def place(draw: Draw) -> str:
    """A city, sometimes with a country after a comma."""
    return f"{city(draw)}, {draw.choice(_COUNTRIES)}" if draw.chance(0.1) else city(draw)


def phrase(draw: Draw) -> str:
    """Two to four words, such as a title, a message or a search query."""
    heads = ("buy", "find", "call", "send", "meet", "clean", "paint", "repair", "visit", "order", "check", "bring")
    forms = (
        lambda: f"{draw.choice(COLOURS)} {draw.choice(OBJECTS)}",
        lambda: f"{draw.choice(heads)} {draw.choice(FOODS + OBJECTS)}",
        lambda: f"{draw.choice(heads)} {first_name(draw)}",
        lambda: f"{draw.choice(heads)} the {draw.choice(COLOURS)} {draw.choice(NOUNS)}",
        lambda: f"{draw.choice(NOUNS)} in {city(draw)}",
        lambda: f"{made_up(draw)} {draw.choice(NOUNS)}",
        lambda: f"{draw.choice(HOBBIES)} with {first_name(draw)}",
        lambda: text(draw),
        lambda: text(draw),
    )
    return draw.choice(forms)()


def text(draw: Draw) -> str:
    """One to six words in random order, sometimes with signs of any alphabet, so that every token is copied in
    training."""
    parts = [draw.choice(COMMON) if draw.chance(0.85) else made_up(draw) for _ in range(draw.integer(1, 6))]
    if draw.chance(0.15):
        parts[0] = parts[0].capitalize()
    if draw.chance(0.1):
        parts.insert(draw.integer(0, len(parts)), foreign(draw))
    return " ".join(parts)


def foreign(draw: Draw) -> str:
    """One to five characters of an alphabet or of signs, without those that have a meaning in JSON or in a sentence."""
    first, last = draw.choice(_ALPHABETS + _SYMBOLS)
    made = "".join(chr(draw.integer(first, last)) for _ in range(draw.integer(1, 5)))
    return "".join(character for character in made if character not in "\"\\'.,;:?!<>{}[]|`") or "é"


def clock_time(draw: Draw) -> str:
    return f"{draw.integer(0, 23):02d}:{draw.choice(('00', '15', '30', '45', '10', '20', '50'))}"


def date(draw: Draw) -> str:
    return f"{draw.integer(2023, 2029)}-{draw.integer(1, 12):02d}-{draw.integer(1, 28):02d}"


def letters_and_digits(draw: Draw, length: int) -> str:
    return "".join(draw.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(length))


def join(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
