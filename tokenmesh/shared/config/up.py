"""UpSettings: what `tokenmesh up` starts, and how it watches over it."""

from pydantic import BaseModel, ConfigDict, Field


class UpSettings(BaseModel):
    """The embedded mesh. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(default=1, ge=1, le=64, description="Worker processes of each model.")
    tokenizers: int = Field(default=1, ge=1, le=64, description="Tokenizer processes.")
    encoders: int = Field(default=1, ge=1, le=64, description="Encoder processes.")
    schedulers: int = Field(default=1, ge=1, le=64, description="Scheduler processes.")
    gateways: int = Field(
        default=1, ge=1, le=64, description="Gateway processes, all of them on the one port."
    )
    server_start_s: float = Field(
        default=10.0, gt=0, description="Time for nats-server and redis-server to accept."
    )
    ready_s: float = Field(
        default=900.0, gt=0, description="Time for the model to load, a download included."
    )
    poll_s: float = Field(default=0.1, gt=0, description="How often readiness is asked for.")
    restart_min_s: float = Field(
        default=0.25, gt=0, description="First pause before a dead process starts again."
    )
    restart_max_s: float = Field(default=10.0, gt=0, description="Longest such pause.")
    max_restarts: int = Field(
        default=5, ge=0, description="Deaths of one process in a row before `up` gives up."
    )
    restart_reset_s: float = Field(
        default=60.0, gt=0, description="Running this long makes earlier deaths forgotten."
    )
    stop_margin_s: float = Field(
        default=5.0,
        gt=0,
        description="Time for a process to leave beyond service.drain_grace_s; then it is killed.",
    )
    tail_lines: int = Field(
        default=40, ge=1, description="Last lines of a process that are kept, to explain its death."
    )
    nats_max_payload_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=1024 * 1024,
        description="max_payload of nats-server; above bus.max_message_bytes.",
    )
    nats_store_bytes: int = Field(
        default=1024**3, ge=1024 * 1024, description="Disk that JetStream may use."
    )
    redis_memory_bytes: int = Field(
        default=512 * 1024 * 1024, ge=1024 * 1024, description="maxmemory of redis-server."
    )
