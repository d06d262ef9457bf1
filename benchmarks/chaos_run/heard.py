"""What came of a request: each choice as the client sees it, and when."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

_GAP_S = 0.05
"""Shorter silences are the machine's own."""


class Gap(NamedTuple):
    """A silence, from the last token before it to the first one after it."""

    start_s: float
    end_s: float
    num_chars: int
    """That were said before."""


@dataclass(slots=True)
class Told:
    """One choice, by parts: `text`, `logged` (tokens that log-probabilities came for), ..."""

    expected: dict[str, str]
    said: dict[str, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    heard_s: float | None = None

    def hear(self, part: str, text: str, now: float) -> None:
        """A chunk brought something."""
        if self.heard_s is not None and now - self.heard_s > _GAP_S:
            self.gaps.append(Gap(self.heard_s, now, sum(map(len, self.said.values()))))
        self.heard_s = now
        self.add(part, text)

    def add(self, part: str, text: str) -> None:
        """Something that comes with what was heard."""
        if text:
            self.said[part] = self.said.get(part, "") + text

    @property
    def fault(self) -> str | None:
        """Which part is not as expected."""
        parts = sorted({*self.expected, *self.said})
        wrong = (each for each in parts if self.expected.get(each, "") != self.said.get(each, ""))
        return next((f"wrong_{part}" for part in wrong), None)


@dataclass(slots=True)
class Heard:
    """A whole request; times are `time.perf_counter` seconds."""

    began_s: float
    num_prompt: int = 0
    """Tokens, where they are known."""
    first_s: float | None = None
    choices: list[Told] = field(default_factory=list)
    num_tokens: int = 0
    fault: str | None = None
    ended_s: float = 0.0
    moves: list[str] = field(default_factory=list)
    """Why its client went to another gateway."""
    tenant: str = ""
    """Whose key it had."""
    usage: Counter[str] | None = None
    """What its client was told, by the names in /v1/usage."""
    response_id: str = ""
    """By which a gateway knows its trace."""
    stored_usage: Counter[str] | None = None
    """The same of a stored response, whose log says so, too."""
    kind: str = ""
    """What the request is for: "plain", "guided", "tools", "stored", ..."""
    asked: str = ""
    """What one needs to know of the request when it has failed."""

    def hear(self, index: int, part: str, text: str, now: float) -> None:
        """A chunk of a choice brought something."""
        self.first_s = self.first_s or now
        self.choices[index].hear(part, text, now)

    @property
    def wrong(self) -> str | None:
        """What is not as expected in any choice."""
        return next((told.fault for told in self.choices if told.fault is not None), None)


class Asker(Protocol):
    """One kind of requests."""

    async def ask(self, heard: Heard) -> str | None:
        """Make a request and fill in `heard`; what is wrong with it. Raises OSError."""
