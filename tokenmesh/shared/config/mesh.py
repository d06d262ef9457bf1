"""Settings that every service has: connections to NATS and Redis, actors, telemetry."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tokenmesh.shared.config.fixed import fixed


class BusSettings(BaseModel):
    """The connection to NATS. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        default="nats://127.0.0.1:4222",
        description="NATS server, or several of one cluster separated by commas.",
    )
    user: str | None = Field(default=None, description="User name.")
    password: SecretStr | None = Field(default=None, description="Password of the user.")
    token: SecretStr | None = Field(default=None, description="Token, instead of user/password.")
    max_message_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        description="Largest encoded message; the server's max_payload must be above it.",
    )
    connect_timeout_s: float = fixed(
        default=2.0, gt=0, description="One attempt to open the connection."
    )
    connect_deadline_s: float = fixed(
        default=15.0, gt=0, description="All attempts at start; then the process exits with 3."
    )
    reconnect_min_s: float = fixed(
        default=0.05, gt=0, description="First pause between two attempts to reconnect."
    )
    reconnect_max_s: float = fixed(
        default=0.5, gt=0, description="Longest pause between two attempts to reconnect."
    )
    reconnect_buffer_bytes: int = fixed(
        default=16 * 1024 * 1024,
        ge=1024,
        description="Bytes kept for sending while the server is away; then calls fail.",
    )
    ping_interval_s: float = fixed(
        default=2.0, gt=0, description="How often a silent connection is probed."
    )
    pending_messages: int = fixed(
        default=8192, ge=1, description="Received messages a subscription holds; more are dropped."
    )
    max_inflight: int = fixed(
        default=65536, ge=1, description="Requests of this process that wait for an answer."
    )
    retry_pause_s: float = fixed(
        default=0.05, gt=0, description="Pause before a request without responders is retried."
    )
    flush_timeout_s: float = fixed(default=5.0, gt=0, description="Wait for the server's PONG.")
    drain_timeout_s: float = fixed(
        default=5.0, gt=0, description="Handing over what was received when a connection closes."
    )


class RedisSettings(BaseModel):
    """The connection to Redis. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        default="redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// URL."
    )
    user: str | None = Field(default=None, description="User name of an ACL, when not in the URL.")
    password: SecretStr | None = Field(default=None, description="Password, when not in the URL.")
    pool_size: int = fixed(default=16, ge=1, description="Connections of one process at most.")
    max_script_calls: int = fixed(
        default=1024,
        ge=1,
        description="Script calls under way at a time; more fail as if Redis were away.",
    )
    connect_timeout_s: float = fixed(default=1.0, gt=0, description="Opening one connection.")
    call_timeout_s: float = fixed(
        default=2.0, gt=0, description="One call, the wait for a pooled connection included."
    )
    blob_ttl_s: int = fixed(
        default=900, ge=1, description="How long a blob lives after it was last put."
    )
    max_blob_bytes: int = Field(
        default=320 * 1024 * 1024,
        ge=1024,
        description="Largest blob; Redis itself stops at 512 MB.",
    )


class ServiceSettings(BaseModel):
    """The runtime around a service's actors. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mailbox_size: int = fixed(
        default=1024,
        ge=1,
        description="Messages an actor holds unstarted; above it the answer is `overloaded`.",
    )
    concurrency: int = Field(default=256, ge=1, description="Handlers of one actor at a time.")
    handler_timeout_s: float = fixed(
        default=600.0, gt=0, description="Bound of a handler whose message carries no deadline."
    )
    restart_min_s: float = fixed(
        default=0.1, gt=0, description="First pause before a crashed background task starts again."
    )
    restart_max_s: float = fixed(
        default=10.0, gt=0, description="Longest pause before it starts again."
    )
    restart_reset_s: float = fixed(
        default=60.0, gt=0, description="Running this long sets the pause back to the first."
    )
    worker_beat_interval_s: float = fixed(
        default=0.25, gt=0, description="Time between two heartbeats of a worker."
    )
    beat_interval_s: float = Field(
        default=1.0, gt=0, description="Time between two heartbeats of any other service."
    )
    missed_beats: int = fixed(
        default=4,
        ge=1,
        description="Intervals without a heartbeat after which an instance counts as dead.",
    )
    max_members: int = fixed(
        default=4096, ge=1, description="Processes that the membership view holds at most."
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, description="Time for running work after the first SIGTERM."
    )
    cancel_grace_s: float = fixed(
        default=2.0, gt=0, description="Time for handlers to clean up once the grace is over."
    )
    exit_with_parent: bool = Field(
        default=False, description="Leave when the parent process dies (embedded runs)."
    )
    skip_broken_models: bool = Field(
        default=False,
        description="A process of several models goes on without those it cannot load (embedded "
        "runs).",
    )
    parent_poll_s: float = fixed(
        default=0.5, gt=0, description="How often the parent is looked for."
    )


LogFormat = Literal["json", "human"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TelemetrySettings(BaseModel):
    """Spans, metrics and logs of a process. Times are seconds, sizes bytes."""

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
        description="Base URL of an OTLP/HTTP collector, such as http://collector:4318.",
    )
    otlp_headers: dict[str, SecretStr] = Field(
        default={}, description="Headers for the collector, such as an authorization."
    )
    otlp_timeout_s: float = fixed(
        default=5.0, gt=0, description="One delivery to the collector, retries included."
    )
    flush_interval_s: float = fixed(
        default=0.2, gt=0, description="How long a finished span waits for others to go with."
    )
    max_queued_spans: int = fixed(
        default=8192, ge=1, description="Finished spans that wait to be sent; more are dropped."
    )
    max_batch_spans: int = fixed(
        default=64, ge=1, description="Spans in one message; encoding them blocks the event loop."
    )
    max_batch_bytes: int = fixed(
        default=512 * 1024, ge=4096, description="Size of one such message; larger ones are split."
    )
    max_span_attributes: int = fixed(default=64, ge=1, description="Attributes kept of a span.")
    max_span_events: int = fixed(default=160, ge=1, description="Events kept of a span.")
    max_attribute_chars: int = fixed(
        default=4096, ge=16, description="Length of a text attribute; the rest is cut off."
    )
    max_traces: int = Field(
        default=1000, ge=1, description="Traces that a gateway keeps; the oldest go first."
    )
    max_trace_spans: int = fixed(default=2000, ge=1, description="Spans kept of one trace.")
    max_trace_bytes: int = fixed(
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
