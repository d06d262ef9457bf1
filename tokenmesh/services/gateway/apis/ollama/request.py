"""Bodies of Ollama's API."""

from typing import Any, Literal

from pydantic import Field, field_validator

from tokenmesh.services.gateway.core.http.fields import Bounded, Flag, Positive
from tokenmesh.shared.config.on_demand import NEVER, duration_s

Think = Flag | Literal["low", "medium", "high", "max"]


class OllamaModel(Bounded, extra="allow", strict=True):
    """It holds what all bodies share."""

    model: str = Field(min_length=1, description="The model; the tag `:latest` may be left out.")
    keep_alive: str | float | None = Field(
        default=None,
        description="How long a model on demand stays awake after this request: `5m`, seconds, 0 "
        "or negative for ever. Without effect on other models.",
    )

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: str | float | None) -> str | float | None:
        if value is not None:
            duration_s(value)
        return value

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds; negative: for ever; None: as before."""
        if self.keep_alive is None:
            return None
        seconds = duration_s(self.keep_alive)
        return -1.0 if seconds == NEVER else seconds

    @property
    def unknown_fields(self) -> list[str]:
        return list(self.model_extra or ())


class OllamaGeneration(OllamaModel):
    """It holds what `/api/chat` and `/api/generate` share."""

    stream: Flag | None = Field(default=True, description="Lines of JSON as they are made.")
    format: str | dict[str, Any] | None = Field(
        default=None, description="`json`, or a JSON schema that the answer follows."
    )
    think: Think | None = Field(default=None, description="Whether, or how much, to reason.")
    options: dict[str, Any] | None = Field(default=None, description="Sampling, as in Ollama.")


class OllamaMessage(Bounded, extra="allow", strict=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None


class OllamaChatRequest(OllamaGeneration):
    """The body of `/api/chat`."""

    messages: list[OllamaMessage] = Field(default=[], description="Without any, nothing is done.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions, as OpenAI's.")


class OllamaGenerateRequest(OllamaGeneration):
    """The body of `/api/generate`."""

    prompt: str | None = Field(default="", description="Without it nothing is done.")
    suffix: str | None = Field(default=None, description="What comes after the answer.")
    system: str | None = Field(default=None, description="A system prompt.")
    images: list[str] | None = Field(default=None, description="Base64.")
    raw: Flag | None = Field(default=False, description="Use the prompt without a template.")
    template: str | None = Field(default=None, description="Not supported.")
    context: list[int] | None = Field(default=None, description="Not supported.")


class OllamaEmbedRequest(OllamaModel):
    """The body of `/api/embed`."""

    input: str | list[str] = Field(default=[], description="A text, or several.")
    truncate: Flag | None = Field(default=True, description="Cut what is too long.")
    dimensions: Positive | None = Field(default=None, description="Keep the first ones.")
    options: dict[str, Any] | None = None


class OllamaEmbeddingsRequest(OllamaModel):
    """The body of `/api/embeddings`."""

    prompt: str = Field(default="", description="One text.")
    options: dict[str, Any] | None = None


class OllamaShowRequest(Bounded, extra="allow", strict=True):
    """The body of `/api/show`."""

    model: str | None = Field(default=None, min_length=1, description="The model.")
    name: str | None = Field(default=None, min_length=1, description="The same; an older name.")
    verbose: Flag | None = None
