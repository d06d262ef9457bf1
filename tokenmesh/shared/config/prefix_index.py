"""PrefixIndexSettings: the prefix index in Redis, for those who write it and those who read it."""

from pydantic import BaseModel, ConfigDict, Field


class PrefixIndexSettings(BaseModel):
    """The same in the whole mesh. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttl_s: float = Field(
        default=15.0, gt=0, description="How long a worker's keys outlive its last heartbeat."
    )
    heartbeat_s: float = Field(
        default=3.0, gt=0, description="How often a worker renews its keys and looks at them."
    )
    write_interval_s: float = Field(
        default=0.005, ge=0, description="How long a worker gathers changes before it writes them."
    )
    write_batch: int = Field(
        default=5000, ge=1, description="Hashes in one command to Redis, which waits meanwhile."
    )
    max_changes: int = Field(
        default=20_000,
        ge=1,
        description="Changes that may wait to be written; beyond, a worker writes all that it has.",
    )
    max_releases: int = Field(
        default=16_384,
        ge=1,
        description="Reservations that may wait to be given back; beyond, their time ends them.",
    )
    lookup_timeout_s: float = Field(
        default=0.1,
        gt=0,
        description="How long a placement waits for the index; then it goes by load alone.",
    )
    retry_s: float = Field(
        default=1.0, gt=0, description="After a failure Redis is left alone for so long."
    )
    reservation_s: float = Field(
        default=30.0, gt=0, description="Lifetime of a reservation that nobody gives back."
    )
    sample_every: int = Field(
        default=16, ge=1, description="One decision in so many has its candidates in the metrics."
    )
