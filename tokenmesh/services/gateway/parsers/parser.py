"""Parser: the interface of all parsers, their events, and what they know of the request.

The joined events are the same for any chunking of the text.
"""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; it ends where the next one begins or the text ends."""

    index: int
    """0, 1, ... in order of appearance."""
    name: str
    model_id: str | None = None
    """The id that the model wrote for the call, in formats that have one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of a call's arguments. All parts joined are the JSON text of an object.

    The arguments of a call that the model did not finish are incomplete JSON.
    """

    index: int
    text: str


Event = Reasoning | Content | CallBegin | CallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of the arguments: formats that write bare values need the types."""
    strict: bool = False
    """Every call must follow that schema, even if the request does not force calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext:
    """It holds what a parser may know of the request before the first token."""

    prompt_tail: str = ""
    """The end of the rendered prompt with special tokens: shows whether it opens a block of
    reasoning that the model continues."""
    continues: bool = False
    """The prompt ends with the model's unfinished message (continue_final_message)."""
    tools: tuple[ToolSchema, ...] = ()
    """Empty: text that looks like a call is content."""
    seed: str = ""
    """Seed of call ids in formats that need them where the model does not write them. It is unique
    for each choice, and the same when the choice is parsed again."""
    thinking: bool | None = None
    """The value of a thinking switch in the request's template arguments, if there is one."""


class Parser(Protocol):
    """Reads the text of one choice in chunks. Never raises, and never drops content.

    Text that may become a marker is held back until that is decided.
    """

    @property
    def is_reasoning(self) -> bool:
        """Return whether the last character pushed belongs to reasoning (for counting its
        tokens).
        """

    def push(self, text: str) -> list[Event]:
        """The events that this text completes."""

    def finish(self) -> list[Event]:
        """The remaining events; called once, when the model has ended."""
