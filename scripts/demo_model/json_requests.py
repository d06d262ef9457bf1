"""JSON on request: the user names fields and values, the answer is one JSON object."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from scripts.demo_model.episode import Episode, exchange, vary
from scripts.demo_model.tool_kinds import SKIES, clock, search, weather
from scripts.demo_model.vocabulary import TRAINING, Vocabulary

_REQUESTS = (
    "Give me JSON with {fields}", "Give me a JSON object with {fields}.", "JSON with {fields}",
    "Write JSON with {fields}.", "Return JSON: {fields}", "Make a JSON object with {fields}.",
    "Create JSON with {fields}", "Answer in JSON: {fields}", "Output a JSON object with {fields}",
    "I need JSON with {fields}.", "Turn this into JSON: {fields}", "Convert to JSON: {fields}",
    "Give me a json with {fields}", "Reply with JSON, {fields}", "Show me JSON with {fields}.",
    "Generate a JSON object where {fields}", "Give me JSON for a person with {fields}.",
    "Give me JSON for an item with {fields}", "Write a JSON object for a user with {fields}",
)  # fmt: skip
_LISTS = (
    "Give me a JSON list of {items}", "JSON list: {items}", "Make a JSON array of {items}.",
    "Write {items} as a JSON list", "Return a JSON array with {items}", "JSON array of {items}",
)  # fmt: skip
_PAIRS = (
    "{k} {v}", "{k} {v}", "{k}: {v}", "{k}={v}", "{k} = {v}", "{k} is {v}", "the {k} {v}",
    "{k} set to {v}", '"{k}": {v}', "{k} equal to {v}", "a {k} of {v}",
)  # fmt: skip
_NUMERIC = frozenset(["age", "size", "price", "count", "score", "level", "year", "id"])


def value_for(rng: Random, field: str, words: Vocabulary) -> Any:
    """A value such as people give a field of this name: a number or a word."""
    if field in _NUMERIC:
        return rng.randint(0, 99)
    if field == "name":
        return words.name(rng)
    return words.city(rng) if field == "city" else words.word(rng)


def make_fields(rng: Random, words: Vocabulary, most: int = 4) -> dict[str, Any]:
    """One to `most` named values; half of the time it is about a person's name."""
    count = rng.choice((1, 2, 2, 2, 3, 3, most))
    names = ["name"] if rng.random() < 0.35 else []
    while len(names) < count:
        candidate = rng.choice(words.fields)
        if candidate not in names:
            names.append(candidate)
    return {name: value_for(rng, name, words) for name in names}


def enumerate_fields(rng: Random, fields: dict[str, Any]) -> str:
    """The fields in one phrase, in order: `name Ada, age 36 and city Oslo`."""
    pair = rng.choice(_PAIRS)
    parts = [pair.format(k=key, v=value) for key, value in fields.items()]
    glue = rng.choice((", ", ", ", " and "))
    return (
        glue.join(parts[:-1]) + rng.choice((" and ", ", ")) + parts[-1]
        if len(parts) > 1
        else (parts[0])
    )


def json_request(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A request for JSON and the object."""
    fields = make_fields(rng, words)
    question = vary(rng, rng.choice(_REQUESTS)).format(fields=enumerate_fields(rng, fields))
    return exchange(question, json.dumps(fields))


def json_list(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A request for a JSON array of words or numbers."""
    numbers = rng.random() < 0.25
    items: list[Any] = [
        rng.randint(0, 99) if numbers else words.word(rng) for _ in range(rng.randint(2, 5))
    ]
    spoken_items = ", ".join(map(str, items[:-1])) + rng.choice((" and ", ", ")) + str(items[-1])
    question = vary(rng, rng.choice(_LISTS)).format(items=spoken_items)
    return exchange(question, json.dumps(items))


def schema_answer(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A question that says nothing of JSON, and the object that a schema forces as its answer."""
    call = rng.choice((weather, clock, search))(rng, words)
    values: list[Any] = [
        rng.choice((True, False)), words.word(rng), rng.randint(0, 39), words.city(rng),
        rng.choice(SKIES), [words.word(rng)], words.name(rng),
    ]  # fmt: skip
    names = [
        "is_warm",
        "condition",
        "temperature",
        "summary",
        "city",
        "kind",
        "items",
        *words.fields,
    ]
    count = rng.randint(1, 4)
    fields = dict(zip(rng.sample(names, count), rng.sample(values, count), strict=True))
    return exchange(call.request, json.dumps(fields))
