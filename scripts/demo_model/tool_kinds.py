"""The kinds of tool that the model knows to call, with the ways to ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.demo_model.episode import Tool, held_out, vary
from scripts.demo_model.vocabulary import Vocabulary

SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool, a request that needs it, the arguments, a result and the answer drawn from it."""

    tool: Tool
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.tool["function"]["name"])

    @property
    def purpose(self) -> str:
        """The tool's description: two tools that share it could both be meant."""
        return str(self.tool["function"]["description"])

    @property
    def is_held_out(self) -> bool:
        """True where training never sees this tool with these arguments."""
        return held_out(f"{self.name}:{json.dumps(list(self.arguments.values()))}", 8)


Kind = Callable[[Random, Vocabulary], Call]


def declare(name: str, about: str, parameters: dict[str, str]) -> Tool:
    """A tool in OpenAI's shape; a parameter is a JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    arguments = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": about, "parameters": arguments}
    return {"type": "function", "function": function}


def weather(rng: Random, words: Vocabulary) -> Call:
    """The example that most people try first."""
    place, city = rng.choice(("city", "location")), words.city(rng)
    name = rng.choice(("get_weather", "get_weather", "get_current_weather"))
    asked = rng.choice(
        ("What is the weather in {c}?", "What is the weather like in {c}?",
         "How is the weather in {c}?", "Weather in {c}", "Tell me the weather in {c}.",
         "Is it warm in {c}?", "What is the weather in {c} today?", "Is it raining in {c}?",
         "Check the weather in {c}.", "What is the temperature in {c}?")
    )  # fmt: skip
    degrees, sky = rng.randint(0, 39), rng.choice(SKIES)
    result = rng.choice(
        (json.dumps({"temperature": degrees, "condition": sky}), f"{degrees} degrees, {sky}",
         json.dumps({"temp_c": degrees, "sky": sky}), f"{sky}, {degrees} C",
         json.dumps({place: city, "temperature": degrees, "condition": sky}))
    )  # fmt: skip
    tool = declare(name, "Get the weather of a city", {place: "string"})
    request = vary(rng, asked).format(c=city)
    answer = f"It is {degrees} degrees and {sky} in {city}."
    return Call(tool, request, {place: city}, result, answer)


def clock(rng: Random, words: Vocabulary) -> Call:
    """The time in a city."""
    place, city = rng.choice(("city", "location")), words.city(rng)
    asked = rng.choice(
        ("What time is it in {c}?", "What is the time in {c}?", "Time in {c}",
         "Tell me the time in {c}.")
    )  # fmt: skip
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    tool = declare("get_time", "Get the current time in a city", {place: "string"})
    request = vary(rng, asked).format(c=city)
    result = rng.choice((json.dumps({"time": time}), time, json.dumps({place: city, "time": time})))
    return Call(tool, request, {place: city}, result, f"It is {time} in {city}.")


def calculator(rng: Random, words: Vocabulary) -> Call:
    """Numbers handed to a tool instead of multiplied in the head."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    asked = rng.choice(
        ("What is {a} * {b}?", "Multiply {a} and {b}", "{a} * {b}", "{a} times {b}",
         "What is {a} times {b}?", "Calculate {a} * {b}.")
    )  # fmt: skip
    tool = declare("multiply", "Multiply two numbers", {"a": "number", "b": "number"})
    request = vary(rng, asked).format(a=a, b=b)
    result = rng.choice((json.dumps({"result": a * b}), str(a * b)))
    return Call(tool, request, {"a": a, "b": b}, result, f"The result is {a * b}.")


def search(rng: Random, words: Vocabulary) -> Call:
    """A search for one or two words."""
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 2)))
    asked = rng.choice(
        ("Search for {x}.", "Search the web for {x}", "Look up {x}", "Find {x}", "Search {x}",
         "Can you search for {x}?")
    )  # fmt: skip
    found = f"{words.word(rng)} {words.word(rng)}"
    tool = declare("search", "Search the web", {"query": "string"})
    request = vary(rng, asked).format(x=text)
    result = rng.choice((json.dumps({"result": found}), found))
    return Call(tool, request, {"query": text}, result, f"The result is {found}.")


def message(rng: Random, words: Vocabulary) -> Call:
    """A message to a person."""
    name = words.name(rng)
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 3)))
    asked = rng.choice(
        ("Send {n} the message {x}", "Write to {n}: {x}", "Tell {n} {x}", 'Send "{x}" to {n}.',
         "Send a message to {n}: {x}")
    )  # fmt: skip
    parameters = {"to": "string", "text": "string"}
    tool = declare("send_message", "Send a message to a person", parameters)
    arguments = {"to": name, "text": text}
    return Call(tool, asked.format(n=name, x=text), arguments, '{"status": "sent"}', "Done.")


KINDS: tuple[tuple[Kind, float], ...] = (
    (weather, 4), (clock, 2), (calculator, 2), (search, 2), (message, 2),
)  # fmt: skip
