"""TelemetrySettings: spans, the traces that gateways keep, metrics endpoint, logs."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

LogFormat = Literal["json", "human"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TelemetrySettings(BaseModel):
    """What a process tells about itself. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="Record and send spans.")
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced; a client's traceparent decides first.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Base URL of an OTLP/HTTP collector, such as http://jaeger:4318.",
    )
    otlp_headers: dict[str, SecretStr] = Field(
        default={}, description="Headers for the collector, such as an authorization."
    )
    otlp_timeout_s: float = Field(
        default=5.0, gt=0, description="One delivery to the collector, retries included."
    )
    flush_interval_s: float = Field(
        default=0.2, gt=0, description="How long a finished span waits for others to go with."
    )
    max_queued_spans: int = Field(
        default=8192, ge=1, description="Finished spans that wait to be sent; more are dropped."
    )
    max_batch_spans: int = Field(
        default=64, ge=1, description="Spans in one message; encoding them blocks the event loop."
    )
    max_batch_bytes: int = Field(
        default=512 * 1024, ge=4096, description="Size of one such message; larger ones are split."
    )
    max_span_attributes: int = Field(default=64, ge=1, description="Attributes kept of a span.")
    max_span_events: int = Field(default=160, ge=1, description="Events kept of a span.")
    max_attribute_chars: int = Field(
        default=4096, ge=16, description="Length of a text attribute; the rest is cut off."
    )
    max_traces: int = Field(
        default=1000, ge=1, description="Traces that a gateway keeps; the oldest go first."
    )
    max_trace_spans: int = Field(default=2000, ge=1, description="Spans kept of one trace.")
    max_trace_bytes: int = Field(
        default=128 * 1024 * 1024, ge=1024, description="Encoded size of all traces kept."
    )
    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port for GET /metrics of this process; 0: none. The gateway has a route.",
    )
    metrics_prefix: str = Field(
        default="tokenmesh",
        pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,31}$",
        description="Names of metrics begin with it and a colon; vllm suits dashboards of vLLM.",
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address that the metrics port is bound to."
    )
    log_format: LogFormat = Field(default="human", description="json: one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severe records that are kept.")
