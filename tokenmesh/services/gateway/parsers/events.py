"""The events of a parser. The joined events are the same for any chunking of the text."""

from dataclasses import dataclass


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
