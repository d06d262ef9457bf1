"""Bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize."""

from typing import Annotated, Any, Final, Literal, Required

from pydantic import ConfigDict, Field, PrivateAttr
from typing_extensions import TypedDict

from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    NotServed,
    NotWithBeams,
    SamplingFields,
)
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    Flag,
    MinusOneOrMore,
    NotNegative,
    Off,
    On,
    Positive,
    TokenId,
)

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

DEFAULT_MAX_TOKENS: Final = 16
"""This is the limit of a completion."""
_THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Names of the switch in chat templates: Qwen's and similar ones; DeepSeek's and Granite's."""


class ChatMessage(TypedDict, total=False):
    """Only the outer shape is checked here; the tokenizer checks parts and tool calls."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    role: Required[str]
    content: str | list[str | dict[str, Any]] | None


class Tool(TypedDict, total=False):
    """A declared function; the template writes it into the prompt."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    type: Required[Literal["function"]]
    function: Required[dict[str, Any]]


class PredictedPart(Bounded, extra="allow", strict=True):
    """One text of several."""

    type: Literal["text"]
    text: str


class PredictedOutput(Bounded, extra="allow", strict=True):
    """It holds what a client expects the answer to be close to."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """All of it; parts are one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(SamplingFields):
    """OpenAI's and vLLM's chat. Unknown fields are kept, a warning lists them."""

    messages: list[ChatMessage] = Field(min_length=1)
    """The conversation."""
    max_tokens: Positive | None = None
    """Tokens of the answer, at most; without it as many as there is room for."""
    max_completion_tokens: Positive | None = None
    """The same; counts before `max_tokens`."""
    logprobs: Flag | None = False
    """Returns the log-probability of each token."""
    top_logprobs: MinusOneOrMore | None = None
    """With `logprobs`: those of so many of the most likely tokens as well, at most `max_logprobs`;
    -1: of the whole vocabulary, where `max_logprobs` allows it (-1: always)."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Annotated[str | dict[str, Any] | None, NotWithBeams("none", "auto")] = None
    """`none`, `auto`, `required`, a function, or `allowed_tools`."""
    parallel_tool_calls: Flag | None = True
    """False: at most one call."""
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template."""
    chat_template: str | None = None
    """In place of the model's own, where `tokenizer.trust_request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the chat template."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor, such as `max_pixels`, for this request."""
    add_generation_prompt: On = True
    """It tells whether the prompt ends with the beginning of the assistant's message."""
    continue_final_message: Off = False
    """It tells whether the answer continues the last message."""
    add_special_tokens: Off = False
    """It tells whether the tokenizer adds special tokens to those of the template."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the chat template; `none` turns reasoning off."""
    include_reasoning: On = True
    """It tells whether the answer contains the model's reasoning."""
    return_prompt_text: Flag | None = None
    """Adds `prompt_text`, the prompt as the model gets it."""
    prediction: PredictedOutput | None = None
    """A text that the answer will be close to. It comes sooner where it is, and is the same."""

    media_io_kwargs: Annotated[dict[str, Any] | None, NotServed()] = None
    modalities: Annotated[list[str] | None, NotServed(None, [], ["text"])] = None
    audio: Annotated[dict[str, Any] | None, NotServed()] = None
    functions: Annotated[
        list[dict[str, Any]] | None,
        NotServed(hint="is not supported: OpenAI has replaced it by tools"),
    ] = None
    function_call: Annotated[
        str | dict[str, Any] | None,
        NotServed(
            None, "none", "auto", hint="is not supported: OpenAI has replaced it by tool_choice"
        ),
    ] = None
    web_search_options: Annotated[dict[str, Any] | None, NotServed(None)] = None

    _merges_system: bool = PrivateAttr(default=False)

    @property
    def merges_system(self) -> bool:
        """As in ChatPrompt. Other APIs set it, no client does."""
        return self._merges_system

    @merges_system.setter
    def merges_system(self, is_merged: bool) -> None:
        self._merges_system = is_merged


class CompletionRequest(SamplingFields):
    """OpenAI's and vLLM's completion."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    """Text or token ids; a list of either is several prompts."""
    prompt_embeds: str | list[str] | None = None
    """With `--enable-prompt-embeds`: base64 of a tensor [tokens, hidden] of float32, float16 or
    bfloat16 in a safetensors file (not as `torch.save` writes it), or a list; before those of
    `prompt`. Not with `echo`, `suffix`, `prompt_logprobs`, `truncate_prompt_tokens`."""
    max_tokens: NotNegative | None = DEFAULT_MAX_TOKENS
    """Tokens of the answer, at most; 0 with `echo` only."""
    logprobs: MinusOneOrMore | None = None
    """Returns the log-probabilities of each token and of so many of the most likely ones, at most
    `max_logprobs`; -1: of the whole vocabulary, where `max_logprobs` allows it (-1: always)."""
    add_special_tokens: On = True
    """It tells whether the tokenizer adds special tokens."""
    suffix: str | None = None
    """Fills in the middle, where the vocabulary has markers for it (Qwen coder, StarCoder,
    CodeGemma, DeepSeek coder, Code Llama, GLM); not with `echo`."""

    best_of: Annotated[int | None, NotServed(None, 1)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself, without those of `prompt_embeds`."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeRequest(Bounded, extra="allow", strict=True):
    """vLLM's: either a prompt or a conversation."""

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


class DetokenizeRequest(Bounded, extra="allow", strict=True):
    """vLLM's: token ids of one text."""

    model: str | None = None
    tokens: list[TokenId]


def template_kwargs(body: ChatRequest) -> dict[str, Any] | None:
    """The chat template's arguments. Those of the client override `reasoning_effort`."""
    effort, given = body.reasoning_effort, body.chat_template_kwargs
    if effort is None:
        return given
    kwargs: dict[str, Any] = {"reasoning_effort": effort, **(given or {})}
    if not any(name in kwargs for name in _THINKING_SWITCHES):
        kwargs |= switch_thinking(effort != "none")
    return kwargs


def switch_thinking(is_on: bool) -> dict[str, bool]:
    """The template's arguments that turn reasoning on or off."""
    return dict.fromkeys(_THINKING_SWITCHES, is_on)


def thinking_switch(kwargs: dict[str, Any] | None) -> bool | None:
    """Return whether the template's arguments turn reasoning on or off; None: neither."""
    for name in _THINKING_SWITCHES:
        value = (kwargs or {}).get(name)
        if isinstance(value, bool):
            return value
    return None
