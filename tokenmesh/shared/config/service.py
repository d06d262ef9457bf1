"""ServiceSettings: mailboxes, beats, drain; the same for all five services."""

from pydantic import BaseModel, ConfigDict, Field


class ServiceSettings(BaseModel):
    """The runtime around a service's actors. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mailbox_size: int = Field(
        default=1024,
        ge=1,
        description="Messages an actor holds unstarted; above it the answer is `overloaded`.",
    )
    concurrency: int = Field(default=256, ge=1, description="Handlers of one actor at a time.")
    handler_timeout_s: float = Field(
        default=600.0, gt=0, description="Bound of a handler whose message carries no deadline."
    )
    overloaded_retry_after_s: float = Field(
        default=0.5, gt=0, description="What a caller of a full mailbox is told to wait."
    )
    restart_min_s: float = Field(
        default=0.1, gt=0, description="First pause before a crashed background task starts again."
    )
    restart_max_s: float = Field(
        default=10.0, gt=0, description="Longest pause before it starts again."
    )
    restart_reset_s: float = Field(
        default=60.0, gt=0, description="Running this long sets the pause back to the first."
    )
    worker_beat_interval_s: float = Field(
        default=0.25, gt=0, description="Time between two beats of a worker."
    )
    beat_interval_s: float = Field(
        default=1.0, gt=0, description="Time between two beats of any other service."
    )
    missed_beats: int = Field(
        default=4,
        ge=1,
        description="Intervals without a beat after which a process counts as gone.",
    )
    max_listening_gap_s: float = Field(
        default=0.5,
        gt=0,
        description="How much of a time without any beat counts against those who were silent: "
        "a process that could not read must not take all others for gone.",
    )
    lag_interval_s: float = Field(
        default=0.02, gt=0, description="How often the event loop measures how late it is."
    )
    max_members: int = Field(
        default=4096, ge=1, description="Processes that the membership view holds at most."
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, description="Time for running work after the first SIGTERM."
    )
    cancel_grace_s: float = Field(
        default=2.0, gt=0, description="Time for handlers to clean up once the grace is over."
    )
    exit_with_parent: bool = Field(
        default=False, description="Leave when the parent process dies (embedded runs)."
    )
    parent_poll_s: float = Field(
        default=0.5, gt=0, description="How often the parent is looked for."
    )
