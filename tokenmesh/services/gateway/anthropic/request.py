"""MessagesRequest and CountTokensRequest: the bodies of /v1/messages and .../count_tokens.

Blocks, tools and the small objects are read one by one (blocks.py, tools.py): what is wrong in one
of them is then told under its own path, not under that of a union of all.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.lenient import (
    Flag,
    MinusOneOrMore,
    Positive,
    Temperature,
    TopP,
)


class _Part(Bounded):
    """Fields that we do not know are the client's business: a newer API has more of them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Message(_Part):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(_Part):
    """Whether the model is to call, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool, with type `tool`."""
    disable_parallel_tool_use: Flag | None = None


class Thinking(_Part):
    """Whether the model is to think, and for how long."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """The last two leave it to the model when and for how long."""
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: blocks come without their text."""


class OutputFormat(_Part):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """The shape of the answer, and how hard to try."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(_Part):
    """Of the request."""

    user_id: str | None = None


class Thread(_Part):
    """State of a conversation that Anthropic's own service keeps."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountTokensRequest(_Part):
    """What makes the prompt."""

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
    """Anthropic's fields and vLLM's additions."""

    max_tokens: Positive
    metadata: Metadata | None = None
    stop_sequences: list[str] | None = None
    stream: Flag | None = False
    temperature: Temperature | None = None
    top_k: MinusOneOrMore | None = None
    top_p: TopP | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: dict[str, Any] | None = None
    """Prompts are cached without being asked."""
    thread: Thread | None = None
    """None is kept: see translation.py."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    mm_payload: str | None = None
    return_mm_kwargs: Flag | None = None
    watermarking: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    container: Any = None
    mcp_servers: list[Any] | None = None
    """These two belong to Anthropic's own machines: see translation.py."""
