"""Keeps what a client received for a request: the text of each choice, and when."""

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
    """Characters received before it."""


@dataclass(slots=True)
class ReceivedChoice:
    """One choice, by parts: `text`, `logged` (tokens that log-probabilities came for), ..."""

    expected: dict[str, str]
    texts: dict[str, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    received_s: float | None = None

    def receive(self, part: str, text: str, now: float) -> None:
        """Add what a chunk brought, and note a silence before it."""
        if self.received_s is not None and now - self.received_s > _GAP_S:
            self.gaps.append(Gap(self.received_s, now, sum(map(len, self.texts.values()))))
        self.received_s = now
        self.add(part, text)

    def add(self, part: str, text: str) -> None:
        """Add to a part without a time, such as a finish reason."""
        if text:
            self.texts[part] = self.texts.get(part, "") + text

    @property
    def fault(self) -> str | None:
        """The part that is not as expected."""
        parts = sorted({*self.expected, *self.texts})
        wrong = (each for each in parts if self.expected.get(each, "") != self.texts.get(each, ""))
        return next((f"wrong_{part}" for part in wrong), None)

    @property
    def is_otherwise(self) -> bool:
        """True where what came does not begin what is expected."""
        return any(
            not self.expected.get(part, "").startswith(text) for part, text in self.texts.items()
        )


@dataclass(slots=True)
class ReceivedResponse:
    """A whole request; times are `time.perf_counter` seconds."""

    began_s: float
    num_prompt: int = 0
    """Tokens, where they are known."""
    first_s: float | None = None
    choices: list[ReceivedChoice] = field(default_factory=list)
    num_tokens: int = 0
    fault: str | None = None
    ended_s: float = 0.0
    moves: list[str] = field(default_factory=list)
    """Reasons for which its client went to another gateway."""
    tenant: str = ""
    """The tenant whose key it used."""
    usage: Counter[str] | None = None
    """The usage that its client received, by the names in /v1/usage."""
    response_id: str = ""
    """The id of its trace in a gateway."""
    stored_usage: Counter[str] | None = None
    """The usage in the log of a stored response."""
    kind: str = ""
    """The kind of request: "plain", "guided", "tools", "stored", ..."""
    described: str = ""
    """A description of the request, for the report of a failure."""
    num_accepted: int = 0
    """Tokens that had been drafted."""

    def receive(self, index: int, part: str, text: str, now: float) -> None:
        """Add what a chunk brought to a choice."""
        self.first_s = self.first_s or now
        self.choices[index].receive(part, text, now)

    @property
    def wrong(self) -> str | None:
        """The part that is not as expected in any choice."""
        return next((shown.fault for shown in self.choices if shown.fault is not None), None)

    @property
    def is_otherwise(self) -> bool:
        """True where a choice does not begin what is expected."""
        return any(shown.is_otherwise for shown in self.choices)


class RequestKind(Protocol):
    """Makes requests of one kind and checks the responses."""

    async def send(self, received: ReceivedResponse) -> str | None:
        """Make a request and fill in `received`; returns what is wrong with it, or None.

        Raises OSError.
        """
