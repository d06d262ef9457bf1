"""SessionConfig: how a session generates responses, and the chat request of one response."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tokenmesh.services.gateway.apis.openai.translation import (
    ChatMessages,
    FieldNames,
    Json,
    TranslatedChat,
    chat_content,
    function_sources,
    validate_chat,
)
from tokenmesh.services.gateway.apis.realtime.audio_input import DEFAULT_AUDIO, AudioConfig
from tokenmesh.services.gateway.apis.realtime.conversation import Item
from tokenmesh.services.gateway.apis.realtime.events import (
    GenerationFields,
    ResponseFields,
    SessionFields,
    check_served,
)
from tokenmesh.services.gateway.core.http.errors import invalid

_FIELDS: Final = (
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "temperature",
    "reasoning",
)
"""Fields that a session.update, or one response, may change."""
_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat request that have another name here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Values as the client sent them, as JSON data."""

    model: str
    instructions: str = ""
    tools: list[Json] | None = None
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | str = "inf"
    temperature: float | None = None
    reasoning: Json | None = None
    audio: AudioConfig = DEFAULT_AUDIO
    is_transcription: bool = False
    """It tells whether the session only transcribes."""
    is_vllm: bool = False
    """It tells whether it does so for a client of vLLM."""
    names_model: bool = True
    """It tells whether the client has named a model, or a transcription, before the session."""

    def updated(self, fields: SessionFields) -> "SessionConfig":
        """The configuration after a session.update. Raises NotSupported."""
        check_served(fields, "session")
        return replace(
            self._changed(fields),
            model=fields.model or self.model,
            audio=self.audio.updated(fields.audio, "session.audio"),
            is_transcription=_kind_of(fields, self) == "transcription",
        )

    def for_response(self, fields: ResponseFields) -> "SessionConfig":
        """The configuration of one response. Raises NotSupported."""
        check_served(fields, "response")
        return self._changed(fields)

    def _changed(self, fields: GenerationFields) -> "SessionConfig":
        given = fields.model_dump(exclude_none=True)
        return replace(self, **{name: given[name] for name in _FIELDS if name in given})

    def view(self, session_id: str, expires_at_s: int) -> Json:
        """The session of session.created and session.updated."""
        if self.is_transcription:
            return {
                "type": "transcription",
                "object": "realtime.transcription_session",
                "id": session_id,
                "expires_at": expires_at_s,
                "audio": self.audio.view(),
            }
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
            "audio": self.audio.view(),
        }


def _kind_of(fields: SessionFields, config: SessionConfig) -> str:
    if "type" in fields.model_fields_set:
        return fields.type
    return "transcription" if config.is_transcription else "realtime"


def translate(config: SessionConfig, items: Iterable[Item]) -> TranslatedChat:
    """The chat request of one response. Raises InvalidInput that names the client's fields."""
    messages = ChatMessages()
    if config.instructions:
        messages.add({"role": "system", "content": config.instructions}, "instructions")
    tool_by_call: dict[str, str] = {}
    for item in items:
        _add_item(messages, item, tool_by_call)
    if not messages.messages:
        raise invalid(
            "response.input",
            "is empty, so there is nothing to answer: create an item or send input",
        )
    fields = {"model": config.model, "messages": messages.messages, **_generation(config)}
    names = FieldNames(_NAMES, messages.sources | function_sources(len(config.tools or ())))
    return TranslatedChat(chat=validate_chat(fields, names), fields=names)


def _add_item(messages: ChatMessages, item: Item, tool_by_call: dict[str, str]) -> None:
    view, path = item.view, f"item {item.id}"
    if view["type"] == "message":
        content = chat_content([_part(part, item) for part in view["content"]])
        messages.add({"role": view["role"], "content": content}, path)
    elif view["type"] == "function_call":
        tool_by_call[view["call_id"]] = view["name"]
        messages.add_call(view["call_id"], view["name"], view["arguments"], path)
    else:
        call_id = view["call_id"]
        result: Json = {"role": "tool", "tool_call_id": call_id, "content": view["output"]}
        if call_id in tool_by_call:
            result["name"] = tool_by_call[call_id]
        messages.add(result, path)


def _part(part: Json, item: Item) -> Json:
    if part["type"] == "input_audio":
        if item.recording is not None:
            return {"type": "input_audio", "file_id": item.recording.file_id}
        return {"type": "text", "text": _spoken(part)}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["text"]}


def _spoken(part: Json) -> str:
    if part.get("transcript") is None:
        raise invalid(
            "response.input",
            "holds audio without a transcript, and the model takes no audio: set "
            "session.audio.input.transcription",
        )
    return str(part["transcript"])


def _generation(config: SessionConfig) -> Json:
    fields: Json = {"stream": True}
    if isinstance(config.max_output_tokens, int):
        fields["max_completion_tokens"] = config.max_output_tokens
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    if config.reasoning and config.reasoning.get("effort") is not None:
        fields["reasoning_effort"] = config.reasoning["effort"]
    if config.tools:
        fields["tools"] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in config.tools
        ]
        if config.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = config.parallel_tool_calls
    choice = config.tool_choice
    # Without tools `auto` and `none` have no effect; the chat refuses other choices.
    if config.tools or choice not in ("auto", "none"):
        if not isinstance(choice, str):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        fields["tool_choice"] = choice
    return fields
