"""CohereChatRequest: the body of /cohere/v2/chat.

Content blocks are validated one by one (translation.py), so that an error names the block's path.
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from tokenmesh.services.gateway.apis.openai.sampling_fields import Temperature, TopP
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    Flag,
    NotNegative,
    Positive,
    Priority,
)


class _Part(Bounded, extra="allow", strict=True, allow_inf_nan=False):
    """Unknown fields are accepted, because a newer version of the API may have more."""


class CohereFunction(_Part):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CohereTool(_Part):
    """A function that the client executes."""

    type: Literal["function"] = "function"
    function: CohereFunction


class CohereCalledFunction(_Part):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class CohereCall(_Part):
    """A tool call in an earlier turn of the assistant."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CohereCalledFunction


class CohereMessage(_Part):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_plan: str | None = None
    """Reasoning before the calls of an assistant's turn."""
    tool_calls: list[CohereCall] | None = None
    tool_call_id: str | None = None
    """The call whose result a turn of a tool has."""


class CohereFormat(_Part):
    """It holds what the answer must be."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None


class CohereThinking(_Part):
    """It tells whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled"]
    token_budget: Positive | None = None


class CohereChatRequest(_Part):
    """Cohere's fields, and those that vLLM adds."""

    model: str = Field(min_length=1)
    messages: list[CohereMessage] = Field(min_length=1)
    stream: Flag | None = False
    tools: list[CohereTool] | None = None
    strict_tools: Flag | None = None
    """Calls follow the schemas of their functions."""
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | dict[str, Any]] | None = None
    """Given to the chat template, each as an object with its text, or with the fields of `data`."""
    citation_options: dict[str, Any] | None = None
    """Given to the chat template; answers have no citations."""
    response_format: CohereFormat | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = None
    """Given to the chat template."""
    max_tokens: NotNegative | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: NotNegative | None = None
    """Draw from so many of the most likely tokens; 0: from all."""
    p: TopP | None = None
    logprobs: Flag | None = None
    thinking: CohereThinking | None = None
    priority: Priority | None = None
    kv_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    watermarking: Any = None

    @field_validator("max_tokens")
    @classmethod
    def _leave_room(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1")
        return value
