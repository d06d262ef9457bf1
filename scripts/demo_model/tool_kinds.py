"""The kinds of tool people declare: natural ones with natural requests, and invented ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.demo_model.arithmetic import is_held_out_sum
from scripts.demo_model.episode import Tool, vary
from scripts.demo_model.json_requests import enumerate_fields, field_name, value_for
from scripts.demo_model.vocabulary import Vocabulary

_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
_GLUE = (" with ", ": ", " where ", " for ", ", ", " using ", " given ")


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


Kind = Callable[[Random, Vocabulary], Call]


def declare(
    rng: Random, name: str, about: str, parameters: dict[str, str | dict[str, Any]]
) -> Tool:
    """A tool in OpenAI's shape; a parameter is a JSON type or a schema."""
    properties: dict[str, dict[str, Any]] = {
        key: ({"type": kind} if isinstance(kind, str) else dict(kind))
        for key, kind in parameters.items()
    }
    if rng.random() < 0.15:
        for key, schema in properties.items():
            schema.setdefault("description", rng.choice(("The {}", "the {}", "{}")).format(key))
    arguments: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        arguments["required"] = [k for k, v in properties.items() if "enum" not in v]
    if rng.random() < 0.1:
        arguments["additionalProperties"] = False
    function = {"name": name, "description": about, "parameters": arguments}
    if rng.random() < 0.06:
        del function["description"]
    tool: Tool = {"type": "function", "function": function}
    if rng.random() < 0.06:
        tool["strict"] = True
    if rng.random() < 0.1:
        return json.loads(json.dumps(tool, sort_keys=True))  # type: ignore[no-any-return]
    return tool


def weather(rng: Random, words: Vocabulary) -> Call:
    """The example everybody tries first."""
    place, city = rng.choice(("city", "location", "location", "place")), words.city(rng)
    if rng.random() < 0.12:
        city += rng.choice((", France", ", CA", ", Germany", ", Japan"))
    name = rng.choice(
        ("get_weather", "get_weather", "get_current_weather", "weather", "getWeather",
         "fetch_weather", "current_weather", "weather_lookup")
    )  # fmt: skip
    about = rng.choice(
        ("Get the weather of a city", "Get the current weather in a given location",
         "Get current weather", "Weather for a place", "Get weather", "Current temperature")
    )  # fmt: skip
    parameters: dict[str, str | dict[str, Any]] = {place: "string"}
    if rng.random() < 0.15:
        parameters[place] = {
            "type": "string", "description": "The city and state, e.g. San Francisco, CA",
        }  # fmt: skip
    arguments, unit = {place: city}, ""
    if rng.random() < 0.35:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5:
            arguments["unit"] = rng.choice(("celsius", "fahrenheit"))
            unit = f" in {arguments['unit']}"
    asked = rng.choice(
        ("What is the weather in {c}{u}?", "What is the weather like in {c}{u}?",
         "How is the weather in {c}{u}?", "Weather in {c}{u}", "Tell me the weather in {c}{u}.",
         "Is it warm in {c}{u}?", "What is the weather in {c} today{u}?",
         "Is it raining in {c}{u}?", "Check the weather in {c}{u}.", "How warm is it in {c}{u}?",
         "Get the weather for {c}{u}",
         "What's the weather like in {c} right now{u}?", "What is the temperature in {c}{u}?")
    )  # fmt: skip
    degrees, sky = rng.randint(-9, 39), rng.choice(_SKIES)
    temperature = rng.choice(("temperature", "temperature", "temp", "degrees"))
    condition = rng.choice(("condition", "sky", "conditions", "weather"))
    shape = rng.random()
    if shape < 0.6:
        result: str = json.dumps({temperature: degrees, condition: sky})
        answer = f"It is {degrees} degrees and {sky} in {city}."
    elif shape < 0.75:
        result = json.dumps({temperature: degrees})
        answer = f"It is {degrees} degrees in {city}."
    elif shape < 0.9:
        result = rng.choice((f"{degrees} degrees, {sky}", f"{sky}, {degrees} degrees"))
        answer = f"It is {degrees} degrees and {sky} in {city}."
    else:
        result, answer = sky, f"It is {sky} in {city}."
    tool = declare(rng, name, about, parameters)
    return Call(tool, vary(rng, asked).format(c=city, u=unit), arguments, result, answer)


def clock(rng: Random, words: Vocabulary) -> Call:
    """The time in a city."""
    place, city = rng.choice(("city", "location", "timezone", "place")), words.city(rng)
    name = rng.choice(("get_time", "get_current_time", "current_time", "time_in", "clock"))
    asked = rng.choice(
        ("What time is it in {c}?", "What is the time in {c}?", "Time in {c}",
         "Tell me the time in {c}.", "How late is it in {c}?")
    )  # fmt: skip
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    tool = declare(rng, name, "Get the current time in a city", {place: "string"})
    result = json.dumps({"time": time}) if rng.random() < 0.7 else time
    request = vary(rng, asked).format(c=city)
    return Call(tool, request, {place: city}, result, f"It is {time} in {city}.")


def calculator(rng: Random, words: Vocabulary) -> Call:
    """Numbers handed to a tool instead of added in the head."""
    while is_held_out_sum(a := rng.randint(2, 999), b := rng.randint(2, 999)):
        continue
    keys = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    name, verb, sign, total = rng.choice(
        (("add", "add", "+", a + b), ("add_numbers", "add", "+", a + b),
         ("multiply", "multiply", "*", a * b), ("subtract", "subtract", "-", a - b))
    )  # fmt: skip
    asked = rng.choice(
        ("What is {a} {s} {b}?", "{v} {a} and {b}", "Use the tool: {a} {s} {b}", "{a} {s} {b}",
         "Calculate {a} {s} {b}.", "Call {n} with {a} and {b}", "Use {n} on {a} and {b}.")
    )  # fmt: skip
    number = rng.choice(("number", "integer"))
    tool = declare(rng, name, f"{verb.capitalize()} two numbers", dict.fromkeys(keys, number))
    request = vary(rng, asked).format(a=a, b=b, s=sign, v=verb.capitalize(), n=name)
    result = json.dumps({"result": total}) if rng.random() < 0.5 else str(total)
    arguments = dict(zip(keys, (a, b), strict=True))
    return Call(tool, request, arguments, result, f"The result is {total}.")


def search(rng: Random, words: Vocabulary) -> Call:
    """A search for a few words."""
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 3)))
    key = rng.choice(("query", "query", "q", "text", "keywords"))
    name = rng.choice(("search", "web_search", "search_web", "google", "search_docs", "find"))
    asked = rng.choice(
        ("Search for {x}.", "Search the web for {x}", "Look up {x}", "Find {x}", "Google {x}",
         "Search {x}", "Can you search for {x}?", "Find something about {x}.")
    )  # fmt: skip
    found = " ".join(words.word(rng) for _ in range(rng.randint(2, 4)))
    tool = declare(rng, name, rng.choice(("Search the web", "Search for a text")), {key: "string"})
    result = found if rng.random() < 0.5 else json.dumps({"result": found})
    request = vary(rng, asked).format(x=text)
    return Call(tool, request, {key: text}, result, f"The result is {found}.")


def email(rng: Random, words: Vocabulary) -> Call:
    """A message to somebody."""
    name = words.name(rng)
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 4)))
    to, body = rng.choice((("to", "text"), ("recipient", "message"), ("to", "body")))
    tool_name = rng.choice(("send_email", "send_message", "send_mail", "message", "notify"))
    asked = rng.choice(
        ("Send {n} the message {x}", "Write to {n}: {x}", "Tell {n} {x}", 'Send "{x}" to {n}.',
         "Send an email to {n}: {x}", "Send a message to {n} saying {x}")
    )  # fmt: skip
    tool = declare(rng, tool_name, "Send a message to a person", {to: "string", body: "string"})
    result = rng.choice(('{"status": "sent"}', "sent", '{"ok": true}', "ok"))
    arguments = {to: name, body: text}
    return Call(tool, asked.format(n=name, x=text), arguments, result, "Done.")


def moment(rng: Random, words: Vocabulary) -> Call:
    """A tool without parameters."""
    noun = rng.choice(words.nouns)
    name = rng.choice((f"get_{noun}", f"show_{noun}", f"read_{noun}", f"list_{noun}"))
    value = words.word(rng) if rng.random() < 0.6 else str(rng.randint(0, 999))
    asked = rng.choice(
        ("What is the {n}?", "Show me the {n}.", "Get the {n}", "Tell me the {n}.", "Call {f}",
         "Use {f}", "Read the {n}.", "I want to see the {n}")
    )  # fmt: skip
    tool = declare(rng, name, f"Get the {noun}", {})
    request = vary(rng, asked).format(n=noun, f=name)
    return Call(tool, request, {}, json.dumps({noun: value}), f"The {noun} is {value}.")


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "integer" if isinstance(value, int) else "string"


def _result(rng: Random, words: Vocabulary) -> tuple[str, str]:
    key = field_name(rng, words)
    value = value_for(rng, key, words)
    if isinstance(value, bool) or rng.random() < 0.15:
        return rng.choice(('{"status": "ok"}', "ok", "done", '{"ok": true}')), "Done."
    if rng.random() < 0.3:
        return str(value), f"The result is {value}."
    return json.dumps({key: value}), f"The {key} is {value}."


def invented(rng: Random, words: Vocabulary) -> Call:
    """Any verb and noun, with named arguments spelled out in the request."""
    verb = rng.choice(words.verbs)
    noun = rng.choice(words.nouns) if rng.random() < 0.8 else words.made_up(rng)
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}", verb + noun.title()))
    parameters: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        key = field_name(rng, words)
        parameters[key] = value_for(rng, key, words)
    asked = rng.choice(
        ("{v} the {n}", "{v} a {n}", "Call {f}", "Use {f}", "{v} {n}", "Use the tool {f}",
         "I want to {v} the {n}", "Run {f}", "Can you {v} the {n}", "{f}", "Please call {f}")
    )  # fmt: skip
    spoken = vary(rng, asked).format(v=verb.replace("_", " "), n=noun, f=name)
    glue = rng.choice(_GLUE)
    request = spoken.rstrip(".?!") + glue + enumerate_fields(rng, parameters)
    if rng.random() < 0.3:
        request += rng.choice((".", "?", "!"))
    about = f"{verb.replace('_', ' ').capitalize()} {rng.choice(('a', 'the', 'one'))} {noun}"
    types: dict[str, str | dict[str, Any]] = {k: _json_type(v) for k, v in parameters.items()}
    result, answer = _result(rng, words)
    return Call(declare(rng, name, about, types), request, parameters, result, answer)


def lookup(rng: Random, words: Vocabulary) -> Call:
    """Any verb and noun for one thing, whose parameter the request does not name."""
    verb, noun = rng.choice(words.verbs), rng.choice(words.nouns)
    key = rng.choice(("name", "id", "query", "item", "title", "product", "symbol", "topic", "for"))
    value: Any = words.word(rng, made_up=0.4)
    if key == "id" and rng.random() < 0.6:
        value = rng.randint(1, 999)
    if key == "name" and rng.random() < 0.5:
        value = words.name(rng)
    name = f"{verb}_{noun}"
    asked = rng.choice(
        ("{v} the {n} of {x}", "{v} the {n} for {x}.", "What is the {n} of {x}?", "{n} of {x}",
         "I need the {n} of {x}", "{v} {n} {x}", "Can you {v} the {n} of {x}?")
    )  # fmt: skip
    request = vary(rng, asked).format(v=verb.replace("_", " ").capitalize(), n=noun, x=value)
    about = f"{verb.replace('_', ' ').capitalize()} the {noun} of something"
    tool = declare(rng, name, about, {key: _json_type(value)})
    result_value = words.word(rng) if rng.random() < 0.5 else str(rng.randint(0, 999))
    result = json.dumps({noun: result_value}) if rng.random() < 0.7 else result_value
    return Call(tool, request, {key: value}, result, f"The {noun} of {value} is {result_value}.")


KINDS: tuple[tuple[Kind, float], ...] = (
    (weather, 3), (clock, 1), (calculator, 1), (search, 1), (email, 1), (moment, 0.7),
    (invented, 4), (lookup, 2),
)  # fmt: skip
