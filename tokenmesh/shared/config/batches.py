"""BatchSettings: batches over uploaded files of requests."""

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.shared.config.fixed import fixed


class BatchSettings(BaseModel):
    """The Batch API. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    priority: int = Field(
        default=1000,
        ge=0,
        description="Added to the tenant's priority: requests of batches wait behind all others.",
    )
    max_line_bytes: int = Field(
        default=1024 * 1024, ge=1024, description="Largest line; a longer one goes to the errors."
    )
    max_output_bytes: int = fixed(
        default=64 * 1024 * 1024,
        ge=1024,
        description="Answers of one batch; requests beyond it are not run and go to the errors. "
        "The errors may have a quarter of it; then the batch fails.",
    )
    max_requests_running: int = fixed(
        default=16,
        ge=1,
        description="Requests of one batch that run at a time; half of the tenant's "
        "max_concurrent, where that is less.",
    )
    max_running: int = fixed(default=16, ge=1, description="Batches that one gateway works on.")
    max_open_per_tenant: int = fixed(
        default=64, ge=1, description="Batches of a tenant that have not ended; then 429."
    )
    completion_window_s: float = fixed(
        default=86_400.0, gt=0, description="After this time a batch expires with what it has."
    )
    max_kept_per_tenant: int = fixed(
        default=1000,
        ge=1,
        description="Batches of a tenant that can be read; a new one replaces the oldest that has "
        "ended.",
    )
    retention_s: float = Field(
        default=3 * 86_400.0,
        ge=1,
        description="How long a batch can be read after its last change; longer than "
        "completion_window_s.",
    )
    max_total_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Disk for the answers of all batches that have not ended; an eighth and 1 MiB "
        "more are for their states.",
    )
    full_wait_s: float = fixed(
        default=60.0,
        ge=0,
        description="How long the answers of a batch wait for that disk; then it fails, with those "
        "that are stored.",
    )
    attempts: int = fixed(
        default=4,
        ge=1,
        description="Attempts of a request whose error is the mesh's own; refusals of an "
        "overloaded or limited mesh do not count.",
    )
    look_interval_s: float = fixed(
        default=0.5, gt=0, description="How often a gateway looks for batches without an owner."
    )
    cancel_wait_s: float = fixed(
        default=2.0, gt=0, description="Time for the owner of a batch to confirm a cancellation."
    )

    @property
    def disk_bytes(self) -> int:
        """The bytes of the stream, with room for states: a batch must end on a full disk, too."""
        return self.max_total_bytes + self.max_total_bytes // 8 + (1 << 20)
