"""What a parser makes of a model's text. A stream of these is the same however it is chunked."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The model answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; it ends where another one begins or the text ends."""

    index: int
    """0, 1, ... in order of appearance."""
    name: str
    model_id: str | None = None
    """The id that the model itself gave the call, in formats that have one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all of them joined are the JSON text of an object.

    Of a call that the model did not finish they are what there is of it.
    """

    index: int
    text: str


Event = Reasoning | Content | CallBegin | CallArguments
