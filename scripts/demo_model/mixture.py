"""Chooses how often each kind of practice occurs, and makes dialogs of episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from scripts.demo_model import arithmetic, knowledge, smalltalk, tool_use, words
from scripts.demo_model.episode import Episode, Message, Tool
from scripts.demo_model.json_requests import json_list, json_request, schema_answer

EpisodeMaker = Callable[[Random], Episode]

MIXTURE: tuple[tuple[EpisodeMaker, float], ...] = (
    (arithmetic.sums, 20), (arithmetic.bare_numbers, 1), (arithmetic.thinking, 12),
    (smalltalk.talk, 14), (smalltalk.introduce, 4), (smalltalk.greet, 1),
    (smalltalk.remember_name, 1), (smalltalk.remember_favorite, 0.7),
    (smalltalk.persona, 0.7), (smalltalk.nameless, 0.2),
    (knowledge.capital, 1), (knowledge.listing, 0.7), (knowledge.count, 1),
    (knowledge.tale, 0.7), (knowledge.unanswerable, 3),
    (words.copy, 10), (words.reverse, 8), (words.reverse_order, 3), (words.spell, 3),
    (words.upper, 1), (words.pick, 1), (json_request, 14), (json_list, 1), (schema_answer, 1.5),
    (tool_use.tool_use, 28), (tool_use.parallel_use, 0.5), (tool_use.thoughtful_tool_use, 0.5),
    (tool_use.forced_use, 1.2),
)  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.", "Be polite.",
    "You are TokenMesh's demo model.", "Answer the user.", "You are a helpful AI assistant.",
    "Answer in one sentence.", "You are a friendly assistant.", "You are a tiny model.",
    "Help the user as well as you can.", "You are helpful and honest.", "Keep it short.",
)  # fmt: skip
_THOUGHTS: tuple[tuple[EpisodeMaker, str], ...] = (
    (smalltalk.talk, "I know the answer to this."),
    (words.reverse, "I have to write the letters from the last to the first."),
    (words.copy, "I have to say the same words."),
    (json_request, "I have to write one JSON object."),
    (knowledge.unanswerable, "I do not know this."),
    (knowledge.capital, "I know the answer to this."),
)
_TEXTS: tuple[EpisodeMaker, ...] = (
    knowledge.tale, knowledge.tale, knowledge.count, knowledge.listing, knowledge.capital,
    smalltalk.talk, arithmetic.sums,
)  # fmt: skip
_MOST_EPISODES = 6


@dataclass(slots=True)
class Dialog:
    """The variables of the chat template."""

    messages: list[Message]
    tools: list[Tool]
    enable_thinking: bool | None


def _thoughtful(rng: Random) -> Episode:
    """An episode of another kind than sums, with a thought before its answer."""
    maker, thought = rng.choice(_THOUGHTS)
    episode = maker(rng)
    answer = episode.messages[-1]
    answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
    return Episode(episode.messages, solo=True, enable_thinking=True)


def _episode(rng: Random) -> Episode:
    if rng.random() < 0.015:
        return _thoughtful(rng)
    makers = [maker for maker, _ in MIXTURE]
    return rng.choices(makers, [weight for _, weight in MIXTURE])[0](rng)


def _merge(rng: Random, episodes: list[Episode]) -> Dialog:
    messages = [message for episode in episodes for message in episode.messages]
    tools: dict[str, Tool] = {}
    for episode in episodes:
        for tool in episode.tools:
            tools.setdefault(tool["function"]["name"], tool)
    system = episodes[0].system
    if system is None and rng.random() < 0.35:
        system = rng.choice(_SYSTEMS)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Dialog(messages, list(tools.values()), episodes[0].enable_thinking)


def make_dialog(rng: Random, longest: int = _MOST_EPISODES) -> Dialog:
    """A dialog of one to `longest` episodes; at most one of them declares tools."""
    first = _episode(rng)
    if first.solo:
        return _merge(rng, [first])
    episodes = [first]
    for _ in range(rng.choice((0, 0, 1, 2, longest - 1))):
        other = _episode(rng)
        if not other.solo and not (other.tools and any(e.tools for e in episodes)):
            episodes.append(other)
    rng.shuffle(episodes)
    return _merge(rng, episodes)


def make_text(rng: Random) -> str:
    """A text without any chat around it, for those who use the model for plain completion."""
    return str(rng.choice(_TEXTS)(rng).messages[-1]["content"])
