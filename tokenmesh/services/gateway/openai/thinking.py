"""What a chat says about thinking, in the words of chat templates."""

from typing import Any, Final

from tokenmesh.services.gateway.openai.chat_request import ChatRequest

_SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the switch: Qwen's and its kin, DeepSeek's and Granite's."""


def template_kwargs(body: ChatRequest) -> dict[str, Any] | None:
    """The template's arguments, `reasoning_effort` among them; the client's own ones count more."""
    effort, given = body.reasoning_effort, body.chat_template_kwargs
    if effort is None:
        return given
    told: dict[str, Any] = {"reasoning_effort": effort, **(given or {})}
    if not any(name in told for name in _SWITCHES):
        told.update(dict.fromkeys(_SWITCHES, effort != "none"))
    return told


def thinking_told(kwargs: dict[str, Any] | None) -> bool | None:
    """Whether the template was told to let the model think, if it was told anything."""
    for name in _SWITCHES:
        value = (kwargs or {}).get(name)
        if isinstance(value, bool):
            return value
    return None
