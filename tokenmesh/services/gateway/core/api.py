"""Api: what one API of clients declares. Routes: what it answers with, built from a Core."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel

from tokenmesh.services.gateway.core.context import ErrorWriter
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http import errors
from tokenmesh.services.gateway.core.http.endpoint import Post
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.journal import Journal


class AnswerKind(NamedTuple):
    """It holds what a route answers with."""

    id_prefix: str
    """It holds what ids of its answers begin with."""
    operation: str | None = None
    """The name of OpenTelemetry's conventions; they have three, for other routes there is none."""


CHAT_OPERATION: Final = "chat"
COMPLETION_OPERATION: Final = "text_completion"
EMBEDDING_OPERATION: Final = "embeddings"


class AnswerShape(NamedTuple):
    """A response with status 200 in the OpenAPI document."""

    kinds: Sequence[type[msgspec.Struct]] = ()
    """The struct of the JSON body; of several it is one. None: any JSON."""
    is_list: bool = False
    """It tells whether the body is a list of them."""
    streams: bool = False
    """It tells whether it may also be a stream of events."""
    media_type: str | None = None
    """This is the type of a body that is not JSON."""
    is_empty: bool = False


class Background:
    """It holds what an API does besides its routes."""

    async def start(self) -> None:
        """Called before the first request."""

    async def run(self) -> None:
        """Work until cancelled; an error ends the process."""

    async def stop(self) -> None:
        """Called after the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """It holds what an API serves."""

    posts: Mapping[str, Post] = field(default_factory=dict)
    """By path."""
    routers: Sequence[APIRouter] = ()
    """All other routes."""
    bodies: Sequence[type[BaseModel]] = ()
    """These are the bodies of their requests, for the OpenAPI document."""
    background: Sequence[Background] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API: a package of `apis`, and a line in its table."""

    name: str
    open_journal: Callable[[MessageBus, Settings], Journal] | None = None
    """It holds what outlives the process: `Core.journals` has it by the API's name."""
    build: Callable[[Core], Routes]
    """Called once, at the start of a gateway."""
    prefixes: tuple[str, ...] = ()
    """These are the beginnings of paths whose errors it writes, also those of requests that do not
    reach a route."""
    write_error: ErrorWriter = errors.write_error
    error_body: type[msgspec.Struct] = errors.ErrorBody
    """It holds what `write_error` writes, for the OpenAPI document."""
    answer_kinds: Mapping[str, AnswerKind] = field(default_factory=dict)
    """By path."""
    exempt: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Patterns of paths that do not count against a tenant's limits, by method.

    They read or end something, which has limits of its own.
    """
    hints: Mapping[str, str] = field(default_factory=dict)
    """Paths of clients of this API that the gateway does not serve, and what to do instead."""
    answers: Mapping[tuple[str, str], AnswerShape] = field(default_factory=dict)
    """By method and path, for the OpenAPI document."""
