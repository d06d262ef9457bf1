"""Bodies of the Responses API as the OpenAPI document has them; they are made as plain data."""

from typing import Any, Literal

import msgspec

Json = dict[str, Any]


Progress = Literal["in_progress", "completed", "incomplete"]


class InputTokens(msgspec.Struct, kw_only=True):
    """The answer of input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class _Item(msgspec.Struct, kw_only=True, tag_field="type"):
    """Part of an output."""

    id: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Json]
    logprobs: list[Json] | None


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of thoughts."""

    text: str


class OutputMessage(_Item, kw_only=True, tag="message"):
    """What the model answers."""

    role: Literal["assistant"]
    content: list[OutputText]
    status: Progress


class Reasoning(_Item, kw_only=True, tag="reasoning"):
    """What the model thinks."""

    summary: list[Json]
    content: list[ReasoningText]
    encrypted_content: None
    status: Progress


class FunctionCall(_Item, kw_only=True, tag="function_call"):
    """A call that the client is to make; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str
    status: Progress


class CustomToolCall(_Item, kw_only=True, tag="custom_tool_call"):
    """The same of a tool that takes free text."""

    call_id: str
    name: str
    input: str
    status: Progress


class McpListTools(_Item, kw_only=True, tag="mcp_list_tools"):
    """What an MCP server offers."""

    server_label: str
    tools: list[Json]
    error: str | None


class McpCall(_Item, kw_only=True, tag="mcp_call"):
    """A call that the gateway makes."""

    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: Json | None
    status: Literal["in_progress", "calling", "completed", "incomplete", "failed"]


OutputItem = OutputMessage | Reasoning | FunctionCall | CustomToolCall | McpListTools | McpCall


class Response(msgspec.Struct, kw_only=True):
    """A response as it is now. It echoes the request's fields besides."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
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
