"""ResponsesRequest: the body of /v1/responses. Items and tools are validated in translation.py."""

from typing import Any, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopP,
)
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    Flag,
    Metadata,
    MinusOneOrMore,
    NotNegative,
    Off,
    On,
    Positive,
    Priority,
    TokenId,
)

LOGPROBS: Literal["message.output_text.logprobs"] = "message.output_text.logprobs"

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]


class ReasoningFields(Bounded, extra="allow", strict=True):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextFormat(Bounded, extra="forbid", strict=True):
    """The format of the text. The fields other than `type` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, min_length=1, max_length=64)
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: Flag | None = None


class TextFields(Bounded, extra="allow", strict=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Bounded, extra="allow", strict=True):
    include_obfuscation: Flag | None = None


class ResponsesRequest(Bounded, extra="allow", strict=True, allow_inf_nan=False):
    """OpenAI's fields, and those that vLLM adds."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    background: Flag | None = False
    conversation: str | dict[str, Any] | None = None
    include: list[Include] | None = None
    include_reasoning: On = True
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: Flag | None = True
    previous_input_messages: list[Any] | None = None
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning: ReasoningFields | None = None
    safety_identifier: str | None = Field(default=None, max_length=1024)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"
    store: Flag | None = None
    stream: Flag | None = False
    stream_options: ResponseStreamOptions | None = None
    text: TextFields | None = None
    tool_choice: str | dict[str, Any] | None = "auto"
    tools: list[dict[str, Any]] | None = None
    top_logprobs: NotNegative | None = 0
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    enable_response_messages: Off = False

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: MinusOneOrMore | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Off = False
    include_stop_str_in_output: Off = False
    skip_special_tokens: On = True
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Priority = 0
    request_id: str | None = Field(default=None, min_length=1)

    # Not served: the chat request refuses them.
    session_id: str | None = None
    watermarking: Any = None
    mm_payload: str | None = None
    return_mm_kwargs: Flag | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id in `conversation`. Raises InvalidInput."""
        given = self.conversation
        found = given.get("id") if isinstance(given, dict) else given
        if given is not None and not isinstance(found, str):
            raise invalid("conversation", "must be an id, or an object with an id")
        return found

    @property
    def items(self) -> list[dict[str, Any]]:
        """`input` as items; a string becomes a user message."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the text has the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def unknown_fields(self) -> list[str]:
        """Names of unknown fields, including those of inner objects with their path."""
        names = list(self.model_extra or ())
        inner = {
            "reasoning": self.reasoning,
            "text": self.text,
            "stream_options": self.stream_options,
        }
        for name, value in inner.items():
            names.extend(f"{name}.{each}" for each in (value and value.model_extra) or ())
        return names
