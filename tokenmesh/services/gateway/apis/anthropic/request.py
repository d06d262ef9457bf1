"""MessagesRequest and CountTokensRequest: the bodies of /v1/messages and .../count_tokens.

Content blocks and tools are validated one by one (blocks.py, translation.py), so that an error
names the path of the block and not that of a union of all block types.
"""

from typing import Any, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.openai.sampling_fields import Temperature, TopP
from tokenmesh.services.gateway.core.http.fields import Bounded, Flag, MinusOneOrMore, Positive


class _Part(Bounded, extra="allow", strict=True, allow_inf_nan=False):
    """Unknown fields are accepted, because a newer version of the API may have more."""


class Message(_Part):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(_Part):
    """It tells whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool's name, with type `tool`."""
    disable_parallel_tool_use: Flag | None = None


class Thinking(_Part):
    """It tells whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """With the last two the model decides when and for how long it reasons."""
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: thinking blocks are sent without their text."""


class OutputFormat(_Part):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """The format of the answer and the reasoning effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(_Part):
    user_id: str | None = None


class Thread(_Part):
    """A conversation that Anthropic's service stores; it is not stored here."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountTokensRequest(_Part):
    """The fields that determine the prompt."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of output_config.format."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Anthropic's fields, and those that vLLM adds."""

    max_tokens: Positive
    metadata: Metadata | None = None
    stop_sequences: list[str] | None = None
    stream: Flag | None = False
    temperature: Temperature | None = None
    top_k: MinusOneOrMore | None = None
    top_p: TopP | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted without effect: all prompts are cached."""
    thread: Thread | None = None
    """Only `create` is accepted (translation.py)."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    mm_payload: str | None = None
    return_mm_kwargs: Flag | None = None
    watermarking: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    container: Any = None
    mcp_servers: list[Any] | None = None
    """These two are services of Anthropic's platform and are refused (translation.py)."""
