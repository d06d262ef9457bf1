"""Settings of placement: the scheduler, the prefix index in Redis, block events."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.shared.config.fixed import fixed

Policy = Literal["estimated_ttft", "least_tokens", "prefix_hash", "round_robin"]


class SchedulerSettings(BaseModel):
    """Limits and weights of scheduler_svc."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Policy = Field(
        default="estimated_ttft",
        description="estimated_ttft: the worker with the earliest first token, its prefix cache "
        "counted. The others are to compare with: least_tokens (the same without caches), "
        "prefix_hash (by how the prompt begins), round_robin.",
    )
    max_queued: int = Field(
        default=1024, ge=0, description="Requests that may wait for a worker; beyond it: 429."
    )
    max_queued_per_tenant: int = fixed(
        default=512,
        ge=0,
        description="Of these, a named tenant's; one tenant cannot fill the queue.",
    )
    keepalive_s: float = fixed(
        default=1.0, gt=0, description="How often a waiting request gets its position."
    )
    worker_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="How long a request waits while no worker of its model lives, or loads it.",
    )
    asleep_retry_after_s: float = fixed(
        default=5.0, gt=0, description="Retry-After while every worker of a model sleeps."
    )
    wake_failure_s: float = fixed(
        default=5.0,
        ge=0,
        description="How long requests for a model that could not be woken are refused at once.",
    )
    assumed_prefill_tokens_per_s: float = fixed(
        default=2000.0, gt=0, description="Prefill rate of a worker that has not measured its own."
    )
    kv_pressure_s: float = fixed(
        default=0.15, ge=0, description="Weight of k/(1-k) seconds for a KV pool in use to share k."
    )
    uncached_weight: float = fixed(
        default=3.0,
        ge=1,
        description="What a second of computing weighs against one of waiting, where another "
        "worker has more of the prompt: computing it twice delays all who come later.",
    )
    tie_s: float = fixed(
        default=0.005, ge=0, description="Costs closer than this (plus 10 %) count as equal."
    )


class PrefixIndexSettings(BaseModel):
    """The same in the whole mesh. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttl_s: float = fixed(
        default=15.0, gt=0, description="How long a worker's keys outlive its last heartbeat."
    )
    heartbeat_s: float = fixed(
        default=3.0, gt=0, description="How often a worker renews its keys and looks at them."
    )
    write_interval_s: float = fixed(
        default=0.005, ge=0, description="How long a worker gathers changes before it writes them."
    )
    write_batch: int = fixed(
        default=5000, ge=1, description="Hashes in one command to Redis, which waits meanwhile."
    )
    max_changes: int = fixed(
        default=20_000,
        ge=1,
        description="Changes that may wait to be written; beyond, a worker writes all that it has.",
    )
    lookup_timeout_s: float = fixed(
        default=0.1,
        gt=0,
        description="How long a placement waits for the index; then it goes by load alone.",
    )
    retry_s: float = fixed(
        default=1.0, gt=0, description="After a failure Redis is left alone for so long."
    )
    reservation_s: float = fixed(
        default=30.0, gt=0, description="Lifetime of a reservation that is not released."
    )
    sample_every: int = fixed(
        default=16, ge=1, description="One decision in so many has its candidates in the metrics."
    )


class BlockEventSettings(BaseModel):
    """Events of the prefix cache, for subscribers outside of the mesh. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(
        default=False,
        description="Publish them. They hold the token ids of every prompt in clear; the "
        "mesh itself does not need them.",
    )
    interval_s: float = fixed(
        default=0.005, ge=0, description="How long a worker gathers events before it publishes."
    )
    heartbeat_s: float = fixed(
        default=3.0, gt=0, description="How often a worker publishes what a subscriber must have."
    )
    batch_bytes: int = fixed(
        default=256 * 1024,
        ge=1024,
        le=1024 * 1024,
        description="About the largest batch of events, or page of a snapshot or a replay.",
    )
    replay_batches: int = Field(
        default=10_000, ge=1, description="Batches that a worker holds for replay."
    )
    max_pending: int = fixed(
        default=4096,
        ge=1,
        description="Changes that may wait to be made into events while the bus takes none.",
    )
    publish_timeout_s: float = fixed(
        default=1.0,
        gt=0,
        description="How long the bus may take for a batch; it counts as dropped then, and "
        "subscribers have it replayed.",
    )
    max_snapshots: int = fixed(
        default=4, ge=1, description="Snapshots of a worker that may be read at one time."
    )
    snapshot_s: float = fixed(
        default=30.0, gt=0, description="How long a snapshot waits for its next page to be read."
    )
