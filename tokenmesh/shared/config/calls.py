"""Sections of the gateway's settings: calls of other services, and workers that may be lost."""

from pydantic import BaseModel, Field

from tokenmesh.shared.config.fixed import fixed


class CallSettings(BaseModel):
    """Deadlines and attempts of what a gateway asks; part of its settings. Times are seconds."""

    admin_timeout_s: float = fixed(
        default=300.0, gt=0, description="Time for all workers to carry out such a command."
    )
    tokenize_timeout_s: float = fixed(default=30.0, gt=0, description="One attempt at Tokenize.")
    encode_timeout_s: float = fixed(default=120.0, gt=0, description="One attempt at Encode.")
    place_idle_s: float = fixed(
        default=3.0,
        gt=0,
        description="Silence of a scheduler after which another one gets the request.",
    )
    accept_timeout_s: float = fixed(
        default=2.0, gt=0, description="A worker that does not accept within it is left out."
    )
    call_attempts: int = fixed(
        default=5,
        ge=1,
        description="Attempts of a request to tokenizers, encoders or schedulers.",
    )
    service_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="How long a request waits while no tokenizer, encoder or scheduler is there or "
        "loads its models.",
    )
    second_ask_s: float = fixed(
        default=0.5,
        gt=0,
        description="Silence of a tokenizer or scheduler after which another one gets it, too.",
    )
    second_ask_chars_per_s: float = fixed(
        default=250_000.0,
        gt=0,
        description="What a tokenizer does at least: with a longer prompt it may be silent for "
        "longer.",
    )
    second_encode_s: float = fixed(
        default=5.0, gt=0, description="The same for an encoder, whose work is longer."
    )
    stream_attempts: int = fixed(
        default=8, ge=1, description="Placements of one stream, the first included."
    )
    retry_pause_s: float = fixed(
        default=0.05, gt=0, description="Pause before a failed call or placement is tried again."
    )
    retry_pause_max_s: float = fixed(
        default=0.5, gt=0, description="The same at most for a call; it grows with each attempt."
    )
    fruitless_attempts: int = fixed(
        default=4,
        ge=1,
        description="Workers in a row that lose a stream before its next token; then it is ended: "
        "it may be what they fail of.",
    )
    wake_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="How long a request waits, within its own time, until its model on demand is "
        "awake; then it gets a 503.",
    )


class LivenessSettings(BaseModel):
    """When a worker counts as lost, and its streams as late; part of the gateway's settings."""

    breaker_failures: float = fixed(
        default=5.0, ge=1, description="Streams a worker may lose before it is left out."
    )
    breaker_half_life_s: float = fixed(
        default=10.0, gt=0, description="After so long a lost stream counts half."
    )
    breaker_s: float = fixed(
        default=2.0, gt=0, description="How long a worker is left out before one stream tries it."
    )
    breaker_max_s: float = fixed(
        default=60.0, gt=0, description="The same at most; it doubles with each failed try."
    )
    breaker_workers: int = fixed(
        default=1024, ge=1, description="Workers whose failures are remembered."
    )
    watch_interval_s: float = fixed(
        default=0.005, gt=0, description="Least pause between two looks of the watchdog."
    )
    silence_s: float = fixed(
        default=0.015, gt=0, description="Least silence of a worker before it is pinged."
    )
    silence_factor: float = fixed(
        default=1.5, ge=1, description="The same in multiples of its usual time between messages."
    )
    silence_max_s: float = fixed(
        default=0.05, gt=0, description="Most silence, however slow a worker's steps are."
    )
    ping_timeout_s: float = fixed(
        default=0.15, gt=0, description="Least time a worker has to answer a ping."
    )
    ping_factor: float = fixed(
        default=4.0, ge=1, description="The same in multiples of its slowest recent answer."
    )
    first_answer_s: float = fixed(
        default=0.1,
        ge=0,
        description="The same answer while none of a worker is known: its first steps load code "
        "and touch memory for the first time.",
    )
    lag_factor: float = fixed(
        default=5.0, ge=0, description="The same in multiples of this process's own lag."
    )
    ping_timeout_max_s: float = fixed(
        default=5.0, gt=0, description="Most time a worker has to answer a ping."
    )
    bus_grace_s: float = fixed(
        default=2.0, ge=0, description="After NATS was lost no worker counts as dead for so long."
    )
    resend_interval_s: float = fixed(
        default=0.1, gt=0, description="Least time between two Resends of a stream with a gap."
    )
    stall_s: float = fixed(
        default=1.0,
        gt=0,
        description="Silence of a stream after which its missing tokens are requested.",
    )
    stall_max_s: float = fixed(
        default=15.0, gt=0, description="Longest pause between two such requests."
    )
