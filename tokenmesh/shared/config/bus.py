"""BusSettings: how a process reaches NATS, and every bound of its connection."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


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
    connect_timeout_s: float = Field(
        default=2.0, gt=0, description="One attempt to open the connection."
    )
    connect_deadline_s: float = Field(
        default=15.0, gt=0, description="All attempts at start; then the process exits with 3."
    )
    reconnect_min_s: float = Field(
        default=0.05, gt=0, description="First pause between two attempts to reconnect."
    )
    reconnect_max_s: float = Field(
        default=2.0, gt=0, description="Longest pause between two attempts to reconnect."
    )
    reconnect_buffer_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1024,
        description="Bytes kept for sending while the server is away; then calls fail.",
    )
    ping_interval_s: float = Field(
        default=2.0, gt=0, description="How often a silent connection is probed."
    )
    max_outstanding_pings: int = Field(
        default=2, ge=1, description="Unanswered probes after which the connection is given up."
    )
    pending_messages: int = Field(
        default=8192, ge=1, description="Received messages a subscription holds; more are dropped."
    )
    pending_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="The same bound in bytes."
    )
    max_inflight: int = Field(
        default=65536, ge=1, description="Requests of this process that wait for an answer."
    )
    retry_pause_s: float = Field(
        default=0.05, gt=0, description="Pause before a request without responders is asked again."
    )
    flush_timeout_s: float = Field(default=5.0, gt=0, description="Wait for the server's PONG.")
    drain_timeout_s: float = Field(
        default=5.0, gt=0, description="Handing over what was received when a connection closes."
    )
    clock_skew_s: float = Field(
        default=1.0,
        gt=0,
        description="Difference to another process's clock that is logged and counted. Deadlines "
        "are right whatever it is.",
    )
    log_interval_s: float = Field(
        default=60.0, gt=0, description="Repeated complaints of one kind are logged this often."
    )
