"""The fields of POST /v1/audio/transcriptions and /v1/audio/translations.

Names and meanings are OpenAI's and vLLM's. They come as a form, so numbers and flags are text.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    MinP,
    NotServed,
    Penalty,
    RepetitionPenalty,
    SamplingFields,
    Seed,
    Temperature,
    TopP,
    marked,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid, invalid_fields
from tokenmesh.services.gateway.core.http.fields import Bounded, Flag, Positive
from tokenmesh.shared.errors import InvalidInput

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
TIMED: Final = ("verbose_json", "srt", "vtt")
"""Formats with segments."""
_MAX_PROMPT_CHARS: Final = 4096
_LISTS: Final = ("timestamp_granularities", "temperatures", "include", "languages", "keywords")
_MAX_TEMPERATURES: Final = 16
_MAX_KEYWORDS: Final = 256
Keyword = Annotated[str, Field(max_length=128)]
_SAMPLED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "repetition_penalty", "presence_penalty"),
)


class SpeechFields(Bounded, extra="allow", use_attribute_docstrings=True, allow_inf_nan=False):
    """It holds what both routes take, besides the file."""

    model: str | None = None
    """One of the served models; may be left out where there is only one."""
    prompt: str = Field(default="", max_length=_MAX_PROMPT_CHARS)
    """Text that came before the recording: it guides spelling and style. Its last tokens count."""
    response_format: ResponseFormat = "json"
    """`srt`, `vtt` and `verbose_json` have segments with times."""
    stream: Flag = False
    """It tells whether text is sent while it is made, as transcript.text.delta events; with `json`
    and `text`."""
    stream_include_usage: Flag = False
    """Accepted: the last event of a stream always has the usage."""
    stream_continuous_usage_stats: Flag = False
    """Adds the usage so far to each delta."""
    temperature: Temperature = 0.0
    """0 takes the most likely token, and where the transcript of a clip is not plausible, draws it
    again at the temperatures of the gateway's settings; not in streams."""
    temperatures: list[Temperature] | None = Field(
        default=None, min_length=1, max_length=_MAX_TEMPERATURES
    )
    """These are the temperatures of each clip, one after another until its transcript is plausible;
    in place of `temperature`."""
    top_p: TopP | None = None
    """Only the most likely tokens with this probability in total."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Only this many most likely tokens; 0 and -1 keep all."""
    min_p: MinP | None = None
    """Only tokens with at least this part of the most likely token's probability."""
    seed: Seed | None = None
    """The same seed draws the same tokens."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time that the transcript contains it."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logits of tokens that the transcript contains."""
    repetition_penalty: RepetitionPenalty | None = None
    """Above 1 makes tokens of the prompt and the transcript less likely."""
    max_completion_tokens: Positive | None = None
    """Tokens of each clip of the recording, at most."""
    user: str | None = None
    """Accepted, without effect."""

    keywords: list[Keyword] | None = Field(default=None, max_length=_MAX_KEYWORDS)
    """Words that are likely to be said, of models whose prompts have a place for them."""
    hotwords: str | None = Field(default=None, max_length=_MAX_PROMPT_CHARS)
    """Further keywords, divided by commas."""
    to_language: Annotated[str | None, NotServed(None, "", "en")] = None
    use_beam_search: Annotated[Flag, NotServed()] = False
    n: Annotated[Positive, NotServed(1)] = 1
    length_penalty: Annotated[float, NotServed(1.0)] = 1.0
    include_stop_str_in_output: Annotated[Flag, NotServed()] = False
    watermarking: Annotated[Any, NotServed()] = None
    vllm_xargs: Annotated[Any, NotServed()] = None

    @property
    def all_keywords(self) -> list[str]:
        """The words of `keywords` and of `hotwords`."""
        given = [*(self.keywords or ()), *(self.hotwords or "").split(",")]
        return [word.strip() for word in given if word.strip()]

    @property
    def granularities(self) -> frozenset[str]:
        """Return what verbose_json has the times of."""
        given = getattr(self, "timestamp_granularities", None)
        return frozenset(given or ("segment",))

    def tried(self, default: tuple[float, ...]) -> tuple[float, ...]:
        """The temperatures of each clip. `default`: for a request that names none."""
        if self.temperatures is not None:
            return tuple(self.temperatures)
        return (self.temperature,) if self.temperature or self.stream else default

    def check(self) -> None:
        """Refuse what is known and not served, and what does not go together."""
        not_served = marked(type(self), NotServed)
        for name in not_served.keys() & self.model_fields_set:
            if not not_served[name].allows(getattr(self, name)):
                hint = not_served[name].hint or "is not supported for recordings"
                raise invalid(name, hint, NotSupported)
        if self.stream and self.response_format in TIMED:
            raise invalid(
                "stream", f"needs response_format json or text, not {self.response_format}"
            )
        if self.temperatures is not None and self.temperature:
            raise invalid("temperatures", "cannot be combined with temperature: give one of them")
        if self.stream and len(self.temperatures or ()) > 1:
            raise InvalidInput(
                "temperatures: a stream takes one value, since text that was sent is final",
                param="temperatures",
            )

    @property
    def sampling(self) -> SamplingFields:
        """The fields that a chat has as well."""
        given = {name: getattr(self, name) for name in _SAMPLED}
        return SamplingFields.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )


class TranscriptionRequest(SpeechFields):
    """A recording becomes text in its own language."""

    language: str | None = None
    """Code of the recording's language, such as `en`; without it the language is detected."""
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    """`segment` (the default), `word` or both, with `verbose_json`."""
    chunking_strategy: Annotated[str | None, NotServed(None, "", "auto")] = None
    """`auto`: long recordings are cut at quiet points, as they are without it."""
    include: Annotated[list[str] | None, NotServed()] = None
    languages: Annotated[list[str] | None, NotServed()] = None

    def check(self) -> None:
        super().check()
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise invalid("timestamp_granularities", "needs response_format verbose_json")


class TranslationRequest(SpeechFields):
    """A recording becomes English text."""

    language: str | None = None
    """Code of the recording's language; without it the language is detected."""


def read_fields(
    kind: type[SpeechFields], form: list[tuple[str, str]]
) -> tuple[SpeechFields, list[str]]:
    """The checked fields of a form, and the names of unknown ones. Raises InvalidInput."""
    values: dict[str, Any] = {}
    for key, text in form:
        name = key.removesuffix("[]")
        if name in _LISTS:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise InvalidInput(f"the form holds {name} twice", param=name)
        else:
            values[name] = text
    try:
        fields = kind.model_validate(values)
    except ValidationError as error:
        raise invalid_fields(error) from None
    fields.check()
    return fields, sorted(fields.model_extra or ())
