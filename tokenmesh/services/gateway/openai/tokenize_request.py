"""TokenizeRequest and DetokenizeRequest: vLLM's bodies of /tokenize and /detokenize."""

from typing import Any

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.chat_request import ChatMessage, Tool
from tokenmesh.services.gateway.openai.lenient import Flag, Off, On
from tokenmesh.services.gateway.openai.sampling_fields import TokenId


class TokenizeRequest(Bounded):
    """Either a prompt or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: Flag | None = None
    """Default: true for a prompt, false for a conversation."""
    return_token_strs: Flag | None = False
    add_generation_prompt: On = True
    continue_final_message: Off = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Bounded):
    """Token ids of one text."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[TokenId]
