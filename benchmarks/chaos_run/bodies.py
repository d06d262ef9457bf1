"""Makes chats and responses, by what the engine can do."""

from typing import Any

_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 6,
            "maxItems": 9,
        },
        "count": {"type": "integer"},
    },
    "required": ["words", "count"],
    "additionalProperties": False,
}
_TOPICS = ("rivers", "stones", "a garden", "the night", "a long road", "bread", "27 + 45", "ships")
_PREFACE = " ".join(
    f"Rule {number}: say what you know about it, and no more." for number in range(30)
)
"""Makes a prompt worth computing elsewhere."""


def chats(model: str, *, has_grammars: bool, are_long: bool = False) -> list[dict[str, Any]]:
    """Choices, log-probabilities, stop strings, sampled and greedy; tools and schemas.

    As many plain streams as guided ones, and about as long: their silences are compared.
    """
    preface = f"{_PREFACE} " if are_long else ""
    common = {"model": model, "max_tokens": 90, "ignore_eos": True}
    found: list[dict[str, Any]] = []
    for seed, topic in enumerate(_TOPICS):
        text = f"{preface}Tell me about {topic}."
        body = {**common, "messages": [{"role": "user", "content": text}]}
        found += [
            {**body, "seed": seed, "n": 2, "temperature": 0.9},
            {**body, "seed": seed, "logprobs": True, "top_logprobs": 2},
            {**body, "seed": seed, "stop": ["e", "a"], "min_tokens": 30},
        ]
        if has_grammars:
            found += _with_grammars({**body, "ignore_eos": False}, seed)
    return found


def _with_grammars(body: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    schema = {"type": "json_schema", "json_schema": {"name": "words", "schema": _SCHEMA}}
    body = {**body, "max_tokens": 200}
    tools = {"tools": [_WEATHER]}
    return [
        # without a seed, but every draw has one outcome
        {**body, "temperature": 0.0, "ignore_eos": True},
        {**body, "seed": seed, "ignore_eos": True},
        {**body, "seed": seed, "response_format": schema, "n": 2},
        {**body, "seed": seed, **tools, "tool_choice": "required"},
        {**body, "temperature": 0.0, **tools, "tool_choice": "auto"},
    ]


def responses(model: str, *, has_grammars: bool) -> list[dict[str, Any]]:
    """Stored responses long enough for a process to die meanwhile."""
    found: list[dict[str, Any]] = []
    for seed, topic in enumerate(_TOPICS):
        body = {"model": model, "input": f"Tell me about {topic}.", "seed": seed}
        found.append({**body, "ignore_eos": True, "max_output_tokens": 140})
        if has_grammars:
            tool = {"type": "function", **_WEATHER["function"], "strict": True}
            call = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
            found.append({**body, **call})
    return found
