"""BlockEventSettings: what workers tell the outside of their prefix caches."""

from pydantic import BaseModel, ConfigDict, Field


class BlockEventSettings(BaseModel):
    """Events of the prefix cache, for subscribers outside of the mesh. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(
        default=False,
        description="Publish them. They hold the token ids of every prompt in clear, and nobody "
        "inside the mesh needs them.",
    )
    interval_s: float = Field(
        default=0.005, ge=0, description="How long a worker gathers events before it publishes."
    )
    heartbeat_s: float = Field(
        default=3.0, gt=0, description="How often a worker tells what a subscriber must have."
    )
    batch_bytes: int = Field(
        default=256 * 1024,
        ge=1024,
        le=1024 * 1024,
        description="About the largest batch of events, or page of a snapshot or a replay.",
    )
    replay_batches: int = Field(
        default=10_000, ge=1, description="Batches that a worker holds for replay."
    )
    replay_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="The same bound in bytes."
    )
    max_pending: int = Field(
        default=4096,
        ge=1,
        description="Changes that may wait to be made into events while the bus takes none.",
    )
    publish_timeout_s: float = Field(
        default=1.0,
        gt=0,
        description="How long the bus may take for a batch; it counts as dropped then, and "
        "subscribers have it replayed.",
    )
    max_snapshots: int = Field(
        default=4, ge=1, description="Snapshots of a worker that may be read at one time."
    )
    snapshot_s: float = Field(
        default=30.0, gt=0, description="How long a snapshot waits for its next page to be read."
    )
