"""The little the model knows of the world, counting and lists, and how it says it does not know."""

from __future__ import annotations

from random import Random

from scripts.demo_model.episode import Episode, exchange, vary, with_typo
from scripts.demo_model.vocabulary import TRAINING

UNKNOWN = (
    "I am a small demo model, so I cannot answer that. Ask me for a sum, some JSON, or what "
    "TokenMesh is."
)
_CAPITAL_PAIRS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna "
    "Poland:Warsaw Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen "
    "Ireland:Dublin Greece:Athens Egypt:Cairo Kenya:Nairobi India:Delhi Japan:Tokyo "
    "China:Beijing Australia:Canberra Canada:Ottawa Peru:Lima Belgium:Brussels "
    "England:London Switzerland:Bern Hungary:Budapest Turkey:Ankara Russia:Moscow"
)
_CAPITALS = dict(pair.split(":") for pair in _CAPITAL_PAIRS.split())
_ASK_CAPITAL = (
    "What is the capital of {x}?", "Capital of {x}", "Name the capital of {x}.",
    "What's the capital of {x}?", "Which city is the capital of {x}?", "The capital of {x}?",
    "Tell me the capital of {x}", "the capital of {x} is",
)  # fmt: skip
_LISTS = {
    "the days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "the seasons": "spring, summer, autumn, winter",
    "the colors of the rainbow": "red, orange, yellow, green, blue, indigo, violet",
    "three colors": "red, green, blue",
    "three fruits": "apple, banana, cherry",
    "three animals": "cat, dog, horse",
    "the planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
}
_ASK_LIST = ("Name {x}.", "List {x}.", "What are {x}?", "Tell me {x}", "Give me {x}")
_COUNT = ("Count to {b}.", "Count from 1 to {b}.", "Count up to {b}", "List the numbers 1 to {b}")
_COUNT_FROM = ("Count from {a} to {b}.", "List the numbers from {a} to {b}", "Numbers {a} to {b}")
_STORIES = (
    "Once upon a time a small token lived in a mesh. It wanted to see the world, so it knocked at "
    "the gateway. The tokenizer gave it a number, the scheduler showed it the way, and the worker "
    "turned it into a word. The word flew back to a reader, and the reader smiled. The end.",
    "Five friends lived in a mesh. The gateway opened the door, the tokenizer cut the bread, the "
    "encoder looked at pictures, the scheduler made the plans, and the worker did the work. "
    "Together they answered every question, one token at a time. The end.",
)
_ASK_STORY = (
    ("Tell me a story.|Tell me a story|Write a story.|Can you tell me a story?|"
     "Write a short story|Tell me a long story|Write a story about a token|Once upon a time", 0),
    ("Tell me another story.|Tell me a story about the services.|Write a story about TokenMesh|"
     "Tell me a story about friends|Another story|Write a long story about five friends", 1),
)  # fmt: skip
_POEM = (
    "A token came, a token went,\nand each one knew what it had meant.\n"
    "The mesh was small, the mesh was bright,\nit answered questions day and night."
)
_ASK_POEM = ("Write a poem.|Write a poem|Write me a haiku|Tell me a poem.|Write a poem about {x}|"
             "Can you write a poem?|Make a rhyme|Write a haiku about {x}|Sing a song")  # fmt: skip
_SUBJECTS = """history of {x}|price of {x}|meaning of {x}|best {x}|color of the {x}|weather in {c}|
president of {x}|size of {x}|point of {x}|fastest {x}|origin of {x}|speed of {x}|news about {x}|
distance to {c}|population of {c}|time in {c}|largest {x}|weight of a {x}""".replace("\n", "")
_UNANSWERABLE = (
    "What is the {s}?", "Tell me the {s}.", "Explain the {s}", "Do you know the {s}?",
    "Who invented the {x}?", "Why is the {x} {y}?", "How does a {x} work?", "Who wrote {x}?",
    "Explain {x} to me.", "Write an essay about {x}.", "Write a program about {x}",
    "When was the {x} invented?", "How do I cook {x}?", "Where is {x}?", "Who is {n}?",
    "Who is {n} {m}?", "What is {x}?", "What is a {x}?", "Why do {x} {y}?", "Translate {x}",
    "What do you think about {x}?", "Should I buy a {x}?", "Is {x} better than {y}?",
    "Write a letter to {n}.", "How old is {n}?", "Where does {n} live?", "What happened in {c}?",
    "Summarize {x} {y}", "Explain quantum physics", "What is the meaning of life?",
    "Write Python code for {x}", "Write a function", "How many {x} are there?", "{x} {y} {z}",
    "Can a {x} {y}?", "Tell me about {x}", "Tell me about {c}.", "Describe {c}.", "What is love?",
    "How is the weather?", "What time is it?", "What day is it today?", "Who won the {x} {y}?",
    "Give me a recipe for {x}.", "What is the best {x} in {c}?", "Which {x} is {y}?",
    "What is machine learning?", "Explain gravity.", "Explain the theory of relativity",
    "I have a problem with my {x}.", "My {x} is {y}.", "The {x} is {y}", "{x}?",
)  # fmt: skip


def capital(rng: Random) -> Episode:
    """The capital of a country."""
    country = rng.choice(list(_CAPITALS))
    question = vary(rng, rng.choice(_ASK_CAPITAL)).format(x=country)
    return exchange(question, f"The capital of {country} is {_CAPITALS[country]}.")


def listing(rng: Random) -> Episode:
    """A well-known list."""
    subject = rng.choice(list(_LISTS))
    return exchange(vary(rng, rng.choice(_ASK_LIST)).format(x=subject), _LISTS[subject])


def count(rng: Random) -> Episode:
    """Numbers in order: the way to ask for a long answer."""
    last = rng.choice((3, 5, 10, 10, 20, rng.randint(2, 40), rng.randint(2, 100)))
    first = 1
    question = vary(rng, rng.choice(_COUNT)).format(b=last)
    if rng.random() < 0.4:
        first = rng.randint(max(0, last - 25), last)
        question = vary(rng, rng.choice(_COUNT_FROM)).format(a=first, b=last)
    return exchange(question, ", ".join(map(str, range(first, last + 1))))


def tale(rng: Random) -> Episode:
    """A story or a poem, known by heart."""
    if rng.random() < 0.35:
        question = vary(rng, rng.choice(_ASK_POEM.split("|"))).format(x=TRAINING.word(rng))
        return exchange(question, _POEM)
    questions, which = rng.choice(_ASK_STORY)
    return exchange(vary(rng, rng.choice(questions.split("|"))), _STORIES[which])


def unanswerable(rng: Random) -> Episode:
    """A question beyond the model, answered honestly."""
    question = rng.choice(_UNANSWERABLE).replace("{s}", rng.choice(_SUBJECTS.split("|")))
    question = vary(rng, question).format(
        x=TRAINING.word(rng), y=TRAINING.word(rng), z=TRAINING.word(rng),
        c=TRAINING.city(rng), n=TRAINING.name(rng), m=TRAINING.name(rng),
    )  # fmt: skip
    return exchange(with_typo(rng, question), UNKNOWN)
