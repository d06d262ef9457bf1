"""RedisSettings: how a process reaches Redis, and the bounds of the blob store kept there."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class RedisSettings(BaseModel):
    """The connection to Redis. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        default="redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// URL."
    )
    password: SecretStr | None = Field(default=None, description="Password, when not in the URL.")
    pool_size: int = Field(default=16, ge=1, description="Connections of one process at most.")
    max_script_calls: int = Field(
        default=1024,
        ge=1,
        description="Script calls under way at a time; more fail as if Redis were away.",
    )
    connect_timeout_s: float = Field(default=1.0, gt=0, description="Opening one connection.")
    call_timeout_s: float = Field(
        default=2.0, gt=0, description="One call, the wait for a pooled connection included."
    )
    blob_ttl_s: int = Field(
        default=900, ge=1, description="How long a blob lives after it was last put."
    )
    max_blob_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="Largest blob; Redis itself stops at 512 MB.",
    )
