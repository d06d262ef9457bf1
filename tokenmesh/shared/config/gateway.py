"""GatewaySettings: the HTTP edge and every limit of a request."""

from math import inf

from pydantic import Field, field_validator, model_validator

from tokenmesh.shared.config.calls import CallSettings, LivenessSettings
from tokenmesh.shared.config.fixed import fixed
from tokenmesh.shared.config.http import (
    BodySettings,
    ConsoleSettings,
    ListenerSettings,
    RealtimeSettings,
    UploadSettings,
)
from tokenmesh.shared.config.requests import (
    AnswerSettings,
    PoolingSettings,
    ScaleOutSettings,
    StructuredLimits,
    TenancySettings,
)

_HASH_CHARS = 64


class GatewaySettings(
    ListenerSettings,
    UploadSettings,
    RealtimeSettings,
    ScaleOutSettings,
    StructuredLimits,
    TenancySettings,
    AnswerSettings,
    PoolingSettings,
    BodySettings,
    ConsoleSettings,
    CallSettings,
    LivenessSettings,
):
    """One gateway process. Times are seconds, sizes bytes."""

    api_key_hashes: tuple[str, ...] = Field(
        default=(), description="SHA-256 (hexadecimal) of each accepted API key; empty: no check."
    )
    sse_keep_alive_s: float = Field(
        default=15.0, ge=0, description="Silence of a stream that a comment breaks; 0: never."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="Origins whose pages may call the API; * for all."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names, such as a proxy's, by which a gateway on loopback without keys may be "
        "called, besides localhost and addresses; * for any.",
    )
    docs: bool = Field(default=True, description="Serve /docs, /redoc and /openapi.json.")
    tokenizer_info: bool = Field(
        default=False, description="Serve /tokenizer_info, the chat template included."
    )
    admin_routes: bool = Field(
        default=False,
        description="Serve /server_info, /sleep, /wake_up, /is_sleeping and the profile routes, "
        "and let processes be drained.",
    )
    drain_timeout_s: float = fixed(
        default=5.0, gt=0, description="Time for a process to confirm that it drains."
    )
    max_metric_workers: int = Field(
        default=64, ge=0, description="Workers and encoders in this gateway's /metrics."
    )
    metrics_wait_s: float = fixed(
        default=1.0, gt=0, description="How long a scrape waits for their answers."
    )
    metrics_interval_s: float = fixed(
        default=0.25,
        ge=0,
        description="Shortest time between two reads, for all scrapers together.",
    )
    model_aliases: dict[str, str] = Field(
        default={}, description="Further names of models: alias to served name."
    )
    model_splits: dict[str, dict[str, float]] = Field(
        default={},
        description="Names that stand for several models: name to weight by model; each request "
        "gets one, by its id.",
    )

    parser_plugins: dict[str, str] = Field(
        default={},
        description="Further parsers of reasoning or tool calls: name to the "
        "package.module:attribute that is imported for it.",
    )
    parser_files: tuple[str, ...] = Field(
        default=(),
        description="Python files with further parsers, which the gateway runs: each has a "
        "dictionary PARSERS of formats by name.",
    )

    max_n: int = Field(default=128, ge=1, description="Largest n.")
    prompt_embeds: bool = Field(
        default=False, description="Take prompt_embeds: prompts as tensors, for those one trusts."
    )
    max_choices: int = Field(default=1024, ge=1, description="Prompts times n of one request.")
    max_stop_strings: int = Field(default=32, ge=0, description="Stop strings of one request.")
    seed: int | None = Field(
        default=None,
        description="Makes the seeds of requests that bring none the same in every run.",
    )
    max_logprobs: int = Field(
        default=20,
        ge=-1,
        description="Largest logprobs, top_logprobs and prompt_logprobs; -1: no limit.",
    )
    inline_logprobs: int = fixed(
        default=500,
        ge=0,
        description="Tokens with log-probabilities up to which the event loop writes an answer.",
    )
    max_logit_bias: int = Field(default=1024, ge=0, description="Entries of logit_bias.")

    request_timeout_s: float = Field(
        default=600.0, gt=0, description="Bound of a request from its first to its last byte."
    )
    write_timeout_s: float = fixed(
        default=60.0, gt=0, description="A client that takes no bytes for so long is given up."
    )

    max_buffered_tokens: int = Field(
        default=8192, ge=1, description="Tokens a slow client may be behind; then it is given up."
    )
    max_vocabularies: int = fixed(default=16, ge=1, description="Tokenizers kept in memory.")
    max_tokenizer_bytes: int = fixed(
        default=256 * 1024 * 1024, ge=1, description="Largest tokenizer text that is read."
    )
    describe_ttl_s: float = fixed(
        default=30.0, gt=0, description="How often a tokenizer is checked for changes."
    )

    @model_validator(mode="after")
    def _splits_are_sound(self) -> "GatewaySettings":
        for name, weights in self.model_splits.items():
            if name in self.model_aliases:
                raise ValueError(f"model_splits: {name!r} is an alias already")
            if not weights or name in weights or any(each in self.model_splits for each in weights):
                raise ValueError(
                    f"model_splits: {name!r} needs models that are not splits themselves"
                )
            if not all(0 < weight < inf for weight in weights.values()):
                raise ValueError(f"model_splits: weights of {name!r} must be above 0")
        return self

    @field_validator("api_key_hashes")
    @classmethod
    def _are_hashes(cls, hashes: tuple[str, ...]) -> tuple[str, ...]:
        """A key in clear text here would never match, and would be kept where it must not be."""
        for each in hashes:
            is_hex = all(char in "0123456789abcdef" for char in each.lower())
            if len(each) != _HASH_CHARS or not is_hex:
                raise ValueError(f"a SHA-256 in hexadecimal ({_HASH_CHARS} characters)")
        return tuple(each.lower() for each in hashes)
