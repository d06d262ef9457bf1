"""Bodies of the Responses API as the OpenAPI document has them; they are made as plain data."""

from typing import Any, Literal

import msgspec

Json = dict[str, Any]


class Response(msgspec.Struct, kw_only=True):
    """A response as it is now. It echoes the request's fields besides."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Json]
    error: Json | None = None
    incomplete_details: Json | None = None
    usage: Json | None = None


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """That a response is gone."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(msgspec.Struct, kw_only=True):
    """A page of what a response was asked."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
