"""ResponseSettings: which responses are stored, for how long, and their MCP servers."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tokenmesh.shared.config.fixed import fixed


class McpServerSettings(BaseModel):
    """Reached by Streamable HTTP."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern="^https?://", description="Its endpoint.")
    headers: dict[str, SecretStr] = Field(
        default={}, description="Sent with every request, such as an authorization."
    )
    allowed_tools: tuple[str, ...] | None = Field(
        default=None, description="Tools that may be used; default: all."
    )


class ResponseSettings(BaseModel):
    """The Responses API's memory. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: bool = Field(
        default=True, description="Store a response whose request leaves `store` out."
    )
    retention_s: float = Field(
        default=24 * 3600.0, ge=1, description="How long a response can be read after its start."
    )
    max_total_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024 * 1024,
        description="Disk for all responses and conversations; from nine tenths of it on the "
        "oldest of the tenant that stores most are deleted.",
    )
    max_record_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=64 * 1024,
        description="Largest record of a response's log; a request may take half of it.",
    )
    max_response_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="Largest log of one response; then it fails.",
    )
    replicas: int = Field(
        default=1, ge=1, le=5, description="Copies of the log in a cluster of NATS servers."
    )
    journal_timeout_s: float = fixed(
        default=2.0, gt=0, description="One request to JetStream; then it is retried."
    )
    journal_patience_s: float = fixed(
        default=30.0,
        gt=0,
        description="All attempts of one append or read; then the response is given up.",
    )
    journal_mute_s: float = fixed(
        default=10.0,
        gt=0,
        description=(
            "How long JetStream may leave appends unanswered while it answers other requests: "
            "longer than it takes to elect a leader. Then its disk counts as full."
        ),
    )
    max_waiting_records: int = fixed(
        default=64,
        ge=1,
        description="Records of a response that wait to become durable; then generation waits.",
    )
    max_feed_bytes: int = fixed(
        default=4 * 1024 * 1024,
        ge=1024,
        description="Events that the client of a running response may be behind.",
    )
    poll_s: float = fixed(
        default=1.0,
        gt=0,
        description="How often a reader looks for records that were not announced.",
    )
    max_running: int = fixed(
        default=1024,
        ge=1,
        description="Responses that one gateway works on apart from a client's connection.",
    )
    background_timeout_s: float = fixed(
        default=3600.0, gt=0, description="Bound of a background response from start to end."
    )
    cancel_wait_s: float = fixed(
        default=2.0,
        gt=0,
        description="Time for a gateway to end a response whose cancellation another one received.",
    )
    adopt_interval_s: float = fixed(
        default=0.5, gt=0, description="How often a gateway looks for responses without an owner."
    )
    max_chain: int = fixed(
        default=64, ge=0, description="Responses that previous_response_id may lead back over."
    )
    max_conversation_bytes: int = fixed(
        default=1024 * 1024,
        ge=1024,
        description="Largest conversation; it is written as a whole by each change.",
    )

    mcp_servers: dict[str, McpServerSettings] = Field(
        default={},
        description="MCP servers that requests may name, by label: url, headers, allowed_tools.",
    )
    mcp_timeout_s: float = Field(
        default=60.0, gt=0, description="One request to an MCP server, connecting included."
    )
    max_mcp_result_bytes: int = Field(
        default=256 * 1024, ge=1024, description="Largest result of a tool; a larger one fails."
    )
    max_tool_calls: int = fixed(
        default=32,
        ge=0,
        description="Calls that one response may make of MCP tools; max_tool_calls may be less.",
    )
