"""Defines the result of every kind of practice, and the ways people really type."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

_OPENERS = ("please ", "Please ", "hey, ", "Hi! ", "ok, ", "now ", "Now ", "can you ", "So, ")
_CLOSERS = (" please", ", please", ", please.", " thanks", " Thanks!", " :)", " ok?")
_SHORT_FORMS = (("What is", "What's"), ("what is", "whats"), ("I am", "I'm"), ("Who is", "Who's"))


@dataclass(slots=True)
class Episode:
    """A few messages that belong together; several episodes make one dialog.

    `system` is set only when the answers depend on it. `solo` episodes are never mixed.
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    system: str | None = None
    solo: bool = False
    enable_thinking: bool | None = None


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def exchange(question: str, answer: str) -> Episode:
    """One question and its answer."""
    return Episode([user(question), assistant(answer)])


def held_out(key: str, one_in: int) -> bool:
    """Return whether `key` belongs to the part (one in `one_in`) that training never sees."""
    return zlib.crc32(key.encode()) % one_in == 0


def vary(rng: Random, template: str) -> str:
    """Another way to type `template`: case, punctuation, courtesy. Placeholders survive."""
    text = template
    if rng.random() < 0.25:
        text = text.replace(*rng.choice(_SHORT_FORMS))
    if rng.random() < 0.12:
        text = rng.choice(_OPENERS) + text[:1].lower() + text[1:]
    if rng.random() < 0.35:
        text = text[:1].lower() + text[1:] if rng.random() < 0.5 else text.lower()
    if rng.random() < 0.4 and text[-1] in ".?!":
        text = text[:-1] + rng.choice(("", "", "", "!", "??", " ?", "."))
    if rng.random() < 0.08 and text[-1] not in ".?!":
        text += rng.choice(_CLOSERS)
    return text


def with_typo(rng: Random, text: str) -> str:
    """`text` with two letters swapped or one lost, now and then."""
    if len(text) < 8 or rng.random() > 0.12:
        return text
    at = rng.randrange(1, len(text) - 2)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1 :]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
