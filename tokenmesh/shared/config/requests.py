"""Settings of the gateway's requests: structured output, responses, scale-out routes, tenants."""

from pathlib import Path

from pydantic import BaseModel, Field, model_validator

from tokenmesh.shared.config.fixed import fixed


class StructuredLimits(BaseModel):
    """A part of GatewaySettings. Sizes are bytes."""

    max_schema_bytes: int = Field(
        default=256 * 1024, ge=2, description="JSON schema, or choices, of structured output."
    )
    max_schema_depth: int = fixed(default=64, ge=1, description="Nesting of such a schema's JSON.")
    max_schema_nodes: int = fixed(
        default=20_000, ge=1, description="Parts (objects, lists, values) of such a schema."
    )
    max_structured_choices: int = Field(
        default=2048, ge=1, description="Strings of structured_outputs.choice."
    )
    max_grammar_bytes: int = Field(
        default=64 * 1024, ge=1, description="EBNF grammar or structural tag."
    )
    max_regex_chars: int = Field(
        default=4096, ge=1, description="Regular expression of structured output, or a pattern."
    )
    max_regex_depth: int = fixed(default=32, ge=0, description="Nested groups of it.")
    max_regex_repetitions: int = fixed(
        default=10_000, ge=1, description="What the counts of its nested repetitions multiply to."
    )
    max_tools: int = Field(default=512, ge=0, description="Functions in tools.")


class PoolingSettings(BaseModel):
    """Requests for embeddings, classes and scores; a part of GatewaySettings."""

    max_pool_inputs: int = Field(
        default=4096, ge=1, description="Prompts, pairs or documents of one such request."
    )
    max_pool_text_chars: int = Field(
        default=500_000, ge=1, description="Characters of one text in it."
    )
    moderation_labels: dict[str, str] = Field(
        default={},
        description="Categories of /v1/moderations by a classifier's labels, where the names of "
        "the labels do not say; safe for a label without a category.",
    )
    moderation_threshold: float = Field(
        default=0.5, ge=0, le=1, description="Score from which on a category is flagged."
    )
    max_pool_tokens: int = Field(
        default=1_048_576, ge=1, description="Tokens of all its prompts together."
    )
    max_pool_media: int = Field(
        default=256, ge=0, description="Images and videos in its prompts together."
    )
    max_pool_values: int = Field(
        default=8_388_608, ge=1, description="Numbers in its answer, of four bytes each."
    )
    max_described_inputs: int = fixed(
        default=256,
        ge=0,
        description="Inputs of a request with encoding_format bytes, whose header describes each.",
    )
    pool_budget_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=64 * 1024,
        description="Numbers of answers over 64 KiB that are held at a time, of a tenant half of "
        "it. Others wait for body_wait_s, max_waiting_bodies of them.",
    )
    pool_batch_tokens: int = fixed(
        default=8192,
        ge=1,
        description="Tokens of the prompts that a worker gets at once; a longer prompt goes alone.",
    )


class AnswerSettings(BaseModel):
    """Part of the gateway's settings."""

    force_include_usage: bool = Field(
        default=False,
        description="Put the usage into every chunk of a stream and at its end, as if each request "
        "had set stream_options.include_usage and continuous_usage_stats.",
    )
    cohere_is_reasoning_model: bool = Field(
        default=True,
        description="Whether /cohere/v2/chat shows reasoning as thinking; false: as the tool_plan "
        "of older models.",
    )
    return_tokens_as_token_ids: bool = Field(
        default=False,
        description="Show tokens of logprobs as `token_id:N` in answers to requests that leave "
        "return_tokens_as_token_ids out.",
    )


class ScaleOutSettings(BaseModel):
    """Frontend and engine apart; a part of GatewaySettings."""

    scale_out: bool = Field(
        default=False,
        description="Serve the render and derender routes, /inference/v1/generate and "
        "/inference/v1/abort_requests; otherwise they answer 403.",
    )
    render_only: bool = Field(
        default=False,
        description="Implies scale_out; /readyz needs a tokenizer and nothing else, for a frontend "
        "without workers.",
    )
    tokens_only: bool = Field(
        default=False,
        description="Implies scale_out; no tokenizer is used: /readyz needs none, stop strings "
        "and text output are refused.",
    )
    inline_derender_tokens: int = fixed(
        default=256,
        ge=0,
        description="Tokens up to which a derender request is processed on the event loop; more "
        "are processed in a thread.",
    )
    max_abort_requests: int = fixed(
        default=1024,
        ge=1,
        description="Ids in one request to /inference/v1/abort_requests.",
    )

    @property
    def serves_scale_out(self) -> bool:
        """Return whether the scale-out routes are enabled."""
        return self.scale_out or self.render_only or self.tokens_only

    @model_validator(mode="after")
    def _is_one_role(self) -> "ScaleOutSettings":
        if self.render_only and self.tokens_only:
            raise ValueError("render_only and tokens_only exclude each other")
        return self


class TenancySettings(BaseModel):
    """A part of GatewaySettings. Times are seconds, sizes bytes."""

    keys_file: Path | None = Field(
        default=None, description="TOML file of tenants and the hashes of their keys."
    )
    keys_refresh_s: float = fixed(
        default=1.0, gt=0, description="How often that file is looked at for changes."
    )
    max_keys_file_bytes: int = fixed(
        default=4 * 1024 * 1024, ge=1, description="Largest file of keys."
    )
    limits_retry_s: float = fixed(
        default=1.0,
        gt=0,
        description="How long a gateway applies limits by itself before it tries Redis again.",
    )
    last_usage_s: float = fixed(
        default=5.0,
        ge=0,
        description="How long a draining gateway with unsaved usage waits for Redis.",
    )
    lease_s: float = fixed(
        default=30.0,
        gt=0,
        description="After this time a running request of a dead gateway no longer counts.",
    )
    max_usage_models: int = fixed(
        default=256, ge=1, description="Models of a tenant's usage; further ones are one: other."
    )
    reads_per_minute: int = Field(
        default=6000,
        ge=1,
        description="Requests of a tenant that count against no limit of its own: those that read "
        "state, and that cancel or delete; at one gateway. Up to a minute's worth at once.",
    )
    max_reads: int = Field(
        default=8,
        ge=1,
        description="Of these, the reads that are answered at a time; others wait.",
    )
    upload_bytes_per_tenant: int = Field(
        default=128 * 1024 * 1024,
        ge=0,
        description="Uploads of a tenant together; the key file may set its max_upload_bytes.",
    )
    upload_bytes_total: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="Uploads of all tenants together, on the disk of JetStream.",
    )
    tenant_sweep_s: float = fixed(
        default=3600.0,
        gt=0,
        description="How often a gateway deletes tenants' keys in Redis whose time has passed.",
    )
    separate_prefix_caches: bool = Field(
        default=False,
        description="A cached prefix serves the tenant that sent it only: neither "
        "times nor cached_tokens reveal the prompts of other tenants.",
    )

    @property
    def upload_disk_bytes(self) -> int:
        """The quota counts 4 KiB for each file on top of its bytes."""
        return self.upload_bytes_total + self.upload_bytes_total // 8 + (1 << 20)
