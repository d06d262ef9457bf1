"""SessionConfig: how a session's responses are made, and how it is shown to the client."""

from dataclasses import dataclass, replace
from typing import Any, Final

from tokenmesh.services.gateway.realtime.fields import (
    GenerationFields,
    ResponseFields,
    SessionFields,
    check_served,
)

_FIELDS: Final = (
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "temperature",
    "reasoning",
)
"""What an update, or a response for itself, may change."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Values as the client gave them, plain JSON data."""

    model: str
    instructions: str = ""
    tools: list[Json] | None = None
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | str = "inf"
    temperature: float | None = None
    reasoning: Json | None = None

    def updated(self, fields: SessionFields) -> "SessionConfig":
        """After a session.update. Raises NotSupported."""
        check_served(fields, "session")
        return replace(self._changed(fields), model=fields.model or self.model)

    def for_response(self, fields: ResponseFields) -> "SessionConfig":
        """As one response wants it. Raises NotSupported."""
        check_served(fields, "response")
        return self._changed(fields)

    def _changed(self, fields: GenerationFields) -> "SessionConfig":
        given = fields.model_dump(exclude_none=True)
        return replace(self, **{name: given[name] for name in _FIELDS if name in given})

    def view(self, session_id: str, expires_at_s: int) -> Json:
        """The session of session.created and session.updated."""
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "expires_at": expires_at_s,
            "model": self.model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "tools": self.tools or [],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "reasoning": self.reasoning,
            "truncation": "disabled",
        }
