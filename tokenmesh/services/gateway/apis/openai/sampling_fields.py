"""The fields that chats and completions share. Names, ranges and meanings are vLLM's.

Each field is declared once, here: its range (the type), its default, its meaning (the text below
it) and by markers what becomes of it. HTTP validation, the conversion to `SamplingParams`, the
render route, beam search, the OpenAPI document and docs/reference/fields.md follow from that.

Types are strict: a number in a string is a mistake of the client that is better reported than
guessed, except for the forms that `fields.py` accepts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.services.gateway.apis.openai.sampling_checks import (
    RepetitionDetection,
    SamplingScope,
    check_allowed_ids,
    check_named_ids,
    check_stop_ids,
    read_logit_bias,
    read_repetition,
)
from tokenmesh.services.gateway.apis.openai.structured import ResponseFormat, StructuredOutputs
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    Flag,
    MinusOneOrMore,
    NotNegative,
    Off,
    On,
    Positive,
    Priority,
    Real,
    TokenId,
    Whole,
    default_for_null,
)
from tokenmesh.shared.messages.sampling import RANGES


def in_range(name: str) -> Any:
    """The bounds of a field of SamplingParams."""
    low, high, is_low_open = RANGES[name]
    return Field(gt=low, le=high) if is_low_open else Field(ge=low, le=high)


Temperature = Annotated[float, in_range("temperature"), Real]
TopP = Annotated[float, in_range("top_p"), Real]
MinP = Annotated[float, in_range("min_p"), Real]
Penalty = Annotated[float, in_range("presence_penalty"), Real]
RepetitionPenalty = Annotated[float, in_range("repetition_penalty"), Real]
LengthPenalty = Annotated[float, Field(ge=-10, le=10), Real]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), Whole]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Marks a field that becomes a field of SamplingParams.

    None is replaced by the model's default, or left at the default of SamplingParams.
    """

    read: Callable[[Any, SamplingScope], object] | None = None
    """Makes the worker's value; raises InvalidInput. None: the value is passed on unchanged."""
    wire_name: str | None = None
    """The name in SamplingParams; None: the same."""


class _Allowed:
    """A marker that lists values."""

    def __init__(self, *values: object, hint: str = "") -> None:
        self.values = values
        self.hint = hint


class NotWithBeams(_Allowed):
    """Marks a field that beam search cannot honor; the values are those without effect."""


class NotServed(_Allowed):
    """Marks a field that is known and not served: a clear refusal, never silently dropped.

    The values without effect pass, since many clients send them with every request. Without a
    list these are all empty values. `hint` completes the error's sentence.
    """

    def allows(self, value: object) -> bool:
        """Return whether the value has no effect."""
        return value in self.values if self.values else not value


_Marker = TypeVar("_Marker", Sampled, NotWithBeams, NotServed)


class StreamOptions(Bounded, extra="allow", strict=True):
    """It holds what a stream contains besides text."""

    include_usage: Off = False
    continuous_usage_stats: Off = False


class SamplingFields(Bounded):
    """Checked field by field; checks over several fields are in `sampling.py`."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str | None = None
    """One of the served models; may be left out where there is only one."""
    frequency_penalty: Annotated[Penalty | None, Sampled(), NotWithBeams(0)] = None
    """Subtracted from a token's logit for each time that the output contains it. Default 0."""
    presence_penalty: Annotated[Penalty | None, Sampled(), NotWithBeams(0)] = None
    """Subtracted once from the logits of tokens that the output contains. Default 0."""
    repetition_penalty: Annotated[RepetitionPenalty | None, Sampled(), NotWithBeams(1)] = None
    """Above 1 makes tokens of the prompt and the output less likely. Default: the model's, or 1."""
    temperature: Annotated[Temperature | None, Sampled()] = None
    """0 takes the most likely token. Default: the model's, or 1."""
    top_p: Annotated[TopP | None, Sampled(), NotWithBeams(1)] = None
    """Only the most likely tokens with this probability in total. Default: the model's, or 1."""
    top_k: Annotated[
        MinusOneOrMore | None, Sampled(lambda k, _: max(0, int(k))), NotWithBeams(0, -1)
    ] = None
    """Only this many most likely tokens; 0 and -1 keep all. Default: the model's, or all."""
    min_p: Annotated[MinP | None, Sampled(), NotWithBeams(0)] = None
    """Only tokens with at least this part of the most likely token's probability. Default 0."""
    seed: Seed | None = None
    """The same seed draws the same tokens; without it the gateway chooses one."""
    n: Positive | None = None
    """Choices of each prompt, at most `max_n`; the width of a beam search."""
    stop: Annotated[str | list[str] | None, NotWithBeams("", [])] = None
    """Texts that end the output, at most `max_stop_strings` of `max_stop_chars` each."""
    stop_token_ids: Annotated[list[TokenId] | None, Sampled(check_stop_ids)] = None
    """Tokens that end the output, at most `max_stop_token_ids`."""
    include_stop_str_in_output: Off = False
    """It tells whether the output contains the stop text."""
    ignore_eos: Annotated[Off, Sampled()] = False
    """Continue after the model's end token."""
    min_tokens: Annotated[
        NotNegative, Sampled(), NotWithBeams(), default_for_null(NotNegative, 0)
    ] = 0
    """Tokens before an end token is drawn, also with `ignore_eos`, or a stop text counts."""
    logit_bias: Annotated[dict[str, float] | None, Sampled(read_logit_bias), NotWithBeams({})] = (
        None
    )
    """Added to the logits of these token ids, -100 to 100; at most `max_logit_bias`."""
    allowed_token_ids: Annotated[
        list[TokenId] | None, Sampled(check_allowed_ids), NotWithBeams()
    ] = None
    """The only tokens that may be drawn."""
    bad_words: Annotated[list[str] | None, NotWithBeams([])] = None
    """Texts that the output does not contain."""
    use_beam_search: Off = False
    """`n` is the width, up to `max_beam_width`: of every beam the 2n most likely tokens are looked
    at, by the model's own log-probabilities; the answers are ordered by their sum over
    length^length_penalty, prompt included. Ends early when no beam can win any more. Not with
    `stream`, nor with fields that change what is drawn."""
    length_penalty: Annotated[LengthPenalty, default_for_null(LengthPenalty, 1.0)] = 1.0
    """For `use_beam_search`."""
    prompt_logprobs: Annotated[MinusOneOrMore | None, NotWithBeams()] = None
    """Log-probabilities of the prompt's tokens and of so many alternatives; -1: of the whole
    vocabulary, where `max_logprobs` allows it. Not with `stream`. 413 where those of the prompt do
    not fit a message of the mesh (`bus.max_message_bytes`): some 14 bytes for each token and each
    of its alternatives."""
    logprob_token_ids: Annotated[
        list[TokenId] | None, Field(min_length=1), Sampled(check_named_ids), NotWithBeams()
    ] = None
    """With `logprobs`: returns those of these tokens instead of the most likely ones, in this
    order; at most `max_logprob_token_ids`. The chosen token stands before them."""
    thinking_token_budget: Annotated[MinusOneOrMore | None, NotWithBeams(-1)] = None
    """After so many tokens of reasoning, in all blocks together and with those that the prompt ends
    with, the model's end marker is drawn; -1: no limit. 400 for a model without a reasoning parser,
    and for harmony."""
    repetition_detection: Annotated[
        RepetitionDetection | None, Sampled(read_repetition, "repetition"), NotWithBeams()
    ] = None
    """`max_pattern_size` (up to `max_repetition_pattern`), `min_pattern_size`, `min_count`: ends a
    choice whose last tokens are one pattern so many times in a row, with `finish_reason`
    `repetition`, `stop_reason` `repetition_detected`."""
    skip_special_tokens: On = True
    """It tells whether special tokens are left out of the text."""
    spaces_between_special_tokens: On = True
    """It tells whether special tokens that are shown have spaces between them."""
    truncate_prompt_tokens: MinusOneOrMore | None = None
    """Cuts the prompt to so many tokens; -1 leaves room for `max_tokens`, or for one token."""
    truncation_side: Literal["left", "right"] | None = None
    """Where the prompt is cut. Default left."""
    stream: Flag | None = False
    """It tells whether the answer comes in chunks."""
    stream_options: StreamOptions | None = None
    """`include_usage`, `continuous_usage_stats`: usage at the end of a stream, in every chunk."""
    stream_interval: Positive | None = None
    """Tokens that a chunk waits for, after the first."""
    echo: Off = False
    """A completion begins with its prompt, a chat's answer with the last message where that has the
    answer's role; with `logprobs` the prompt's come along."""
    return_token_ids: Flag | None = None
    """Adds `token_ids` (the generated ones, also with `echo`) and `prompt_token_ids`."""
    return_tokens_as_token_ids: Flag | None = None
    """Log-probabilities show `token_id:7` in place of text (`--return-tokens-as-token-ids` makes it
    the default)."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Prompts share cached blocks only with prompts of the same salt."""
    priority: Priority = 0
    """A lower number is served first, also before requests that wait already."""
    request_id: str | None = Field(default=None, min_length=1)
    """The answer's id, in place of the header X-Request-Id."""
    user: str | None = None
    """Accepted, without effect."""
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        NotServed(None, "auto", "default"),
    ] = None
    """`auto` and `default` are served, and answered with `default`; others are a 400."""
    session_id: str | None = Field(default=None, max_length=256)
    """Written to the trace (`session.id`)."""
    metadata: dict[str, Any] | None = None
    """Accepted, without effect."""
    response_format: Annotated[ResponseFormat | None, NotWithBeams({"type": "text"})] = None
    """Constrains the output, as OpenAI has it."""
    structured_outputs: Annotated[StructuredOutputs | None, NotWithBeams()] = None
    """Constrains the output, as vLLM has it; not together with `response_format`."""

    watermarking: Annotated[Any, NotServed()] = None
    return_token_offsets: Flag | None = None
    """With the render routes: where each token is in the prompt's text, `token_offsets`; null for
    prompts of ids and with media. Elsewhere without effect, with a warning."""
    kv_transfer_params: Annotated[dict[str, Any] | None, NotServed()] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, NotServed()] = None
    vllm_xargs: Annotated[dict[str, Any] | None, NotServed()] = None
    return_mm_kwargs: Annotated[Flag | None, NotServed()] = None
    mm_payload: Annotated[str | None, NotServed(None, "tensors")] = None
    routed_experts_prompt_start: Annotated[int | None, NotServed()] = None

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def unknown_fields(self) -> list[str]:
        """Names of top-level fields that are not declared."""
        return list(self.model_extra or ())


@cache
def marked(model: type[BaseModel], marker: type[_Marker]) -> dict[str, _Marker]:
    """The fields of a model that have a marker, with it."""
    return {
        name: each
        for name, field in model.model_fields.items()
        for each in field.metadata
        if isinstance(each, marker)
    }


SAMPLED: Final = marked(SamplingFields, Sampled)
"""The fields that become fields of SamplingParams."""
