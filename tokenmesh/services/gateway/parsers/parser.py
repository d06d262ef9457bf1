"""Parser: the interface of all parsers, and what they are told of the request."""

from dataclasses import dataclass
from typing import Any, Protocol

from tokenmesh.services.gateway.parsers.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of the arguments: formats that write bare values need the types."""
    strict: bool = False
    """Calls must follow that schema, also those that the model makes of its own accord."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext:
    """What a parser may know of the request before the first token."""

    prompt_tail: str = ""
    """The end of the rendered prompt with special tokens shown: tells whether it opens a block of
    reasoning that the model only continues."""
    continues: bool = False
    """The prompt ends with the model's own, unfinished message (continue_final_message)."""
    tools: tuple[ToolSchema, ...] = ()
    """Empty: text that looks like a call is content."""
    seed: str = ""
    """What ids are made of that a format needs and the model does not write: the same for whoever
    reads this choice again, another one for any other choice."""
    thinking: bool | None = None
    """What the request's template arguments say about thinking, if anything."""


class Parser(Protocol):
    """Takes one choice's text in any portions. Never raises, never loses a character of content.

    Text that may turn out to be a marker is held back until that is decided.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character pushed belongs to reasoning (for counting its tokens)."""

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""

    def finish(self) -> list[Event]:
        """The rest, when the model has ended, wherever it stopped."""
