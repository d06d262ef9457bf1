"""ChatRequest: the body of /v1/chat/completions."""

from typing import Any, Literal, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from tokenmesh.services.gateway.openai.lenient import Flag, MinusOneOrMore, Off, On, Positive
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatMessage(TypedDict, total=False):
    """Only the frame is checked here: parts and tool calls are the tokenizer's to judge."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    role: Required[str]
    content: str | list[str | dict[str, Any]] | None


class Tool(TypedDict, total=False):
    """A declared function; the template writes it into the prompt."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    type: Required[Literal["function"]]
    function: Required[dict[str, Any]]


class ChatRequest(SamplingFields):
    """See api reference of OpenAI and vLLM; unknown fields are kept and named in a warning."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: Flag | None = False
    top_logprobs: MinusOneOrMore | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = True
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: On = True
    continue_final_message: Off = False
    add_special_tokens: Off = False
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: On = True
    return_prompt_text: Flag | None = None

    # Known and not served yet.
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
