"""Copying, reversing, spelling and ordering words."""

from __future__ import annotations

from random import Random

from scripts.demo_model.episode import Episode, exchange, vary
from scripts.demo_model.vocabulary import TRAINING, Vocabulary

_COPY = (
    "Repeat after me: {x}", "Say {x}", 'Say "{x}"', "Repeat: {x}", "Copy this: {x}", "Echo {x}",
    "Please repeat: {x}", "Write {x}", "Say this: {x}", "Print {x}", 'Repeat "{x}"',
    "Can you say {x}", "Repeat the words {x}", "copy: {x}", "Just say {x}", "Say exactly: {x}",
    "Repeat this sentence: {x}", "Repeat the word {x}", "Reply with exactly: {x}",
    "Reply with {x}", "Answer with {x}", "Only say {x}", 'Reply with "{x}"', "Respond with: {x}",
    "Reply with the word {x}", "Say the word {x}", "Reply only with {x}", "Answer only: {x}",
)  # fmt: skip
_REVERSE = (
    "Reverse the word {x}", 'Reverse "{x}"', "Reverse {x}", "Spell {x} backwards",
    "Write {x} backwards", "What is {x} backwards?", "Reverse this word: {x}",
    "Reverse the letters of {x}", "Write the word {x} in reverse.", "{x} backwards",
    "Turn the word {x} around.", "reverse: {x}",
)  # fmt: skip
_ORDER = (
    "Reverse the order of these words: {x}", "Reverse the words: {x}",
    "Say these words in reverse order: {x}", "Write these words backwards: {x}",
    "Reverse the order: {x}", "Reverse the list: {x}",
)  # fmt: skip
_SPELL = (
    "Spell {x}", "Spell the word {x}.", "How do you spell {x}?", 'Spell "{x}"',
    "Spell out {x}", "List the letters of {x}.",
)  # fmt: skip
_UPPER = (
    "Write {x} in upper case", "Uppercase {x}", "Write {x} in capital letters.",
    "Make {x} uppercase.",
)  # fmt: skip
_PICK = (
    ("What is the first word of: {x}", 0), ("First word of: {x}", 0),
    ("What is the last word of: {x}", -1), ("Last word of: {x}", -1),
)  # fmt: skip


def copy(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A phrase said again, exactly."""
    parts = [words.word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5)))]
    text = " ".join(parts)
    if rng.random() < 0.2:
        text = text.capitalize() + rng.choice((".", "!", ""))
    if rng.random() < 0.1:
        text = f"{words.name(rng)} {text}"
    if rng.random() < 0.1:
        text += f" {rng.randint(0, 999)}"
    return exchange(rng.choice(_COPY).format(x=text), text)


def reverse(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """One word with its letters in reverse."""
    word = words.word(rng)
    return exchange(vary(rng, rng.choice(_REVERSE)).format(x=word), word[::-1])


def reverse_order(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """Several words, last one first."""
    parts = [words.word(rng) for _ in range(rng.randint(2, 6))]
    glue = rng.choice((" ", " ", ", "))
    return exchange(rng.choice(_ORDER).format(x=glue.join(parts)), glue.join(parts[::-1]))


def spell(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """The letters of a word, one by one."""
    word = words.word(rng)
    return exchange(vary(rng, rng.choice(_SPELL)).format(x=word), "-".join(word))


def upper(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A word in capital letters."""
    word = words.word(rng)
    return exchange(vary(rng, rng.choice(_UPPER)).format(x=word), word.upper())


def pick(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """The first or last of a few words."""
    parts = [words.word(rng) for _ in range(rng.randint(2, 6))]
    question, at = rng.choice(_PICK)
    return exchange(vary(rng, question).format(x=" ".join(parts)), parts[at])
