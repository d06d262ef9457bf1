"""UpSettings: what `tokenmesh up` starts, and how it watches over it."""

import re
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tokenmesh.shared.config.fixed import fixed

_RELEASE: Final = re.compile(r"(redis|valkey) [0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}")


class UpSettings(BaseModel):
    """The embedded mesh. Times are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(default=1, ge=1, le=64, description="Worker processes of each model.")
    tokenizers: int = Field(default=1, ge=1, le=64, description="Tokenizer processes.")
    prefill_workers: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Worker processes of each model, besides workers, that compute long prompts "
        "for them (worker.kv.role).",
    )
    encoders: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Encoder processes; unless set, none where all models are GGUF files or "
        "language_model_only.",
    )
    schedulers: int = Field(default=1, ge=1, le=64, description="Scheduler processes.")
    gateways: int = Field(
        default=1, ge=1, le=64, description="Gateway processes, all of them on the one port."
    )
    strict: bool = Field(
        default=False,
        description="End when one of several models cannot be loaded, and do not serve the others.",
    )
    max_awake_models: int = Field(
        default=1,
        ge=1,
        description="Models on demand that are awake at a time, each with all of its workers.",
    )
    server_start_s: float = fixed(
        default=10.0, gt=0, description="Time for nats-server and redis-server to accept."
    )
    ready_s: float = Field(
        default=900.0, gt=0, description="Time for the model to load, a download included."
    )
    poll_s: float = fixed(default=0.1, gt=0, description="How often readiness is checked.")
    restart_min_s: float = fixed(
        default=0.25, gt=0, description="First pause before a dead process starts again."
    )
    restart_max_s: float = Field(default=10.0, gt=0, description="Longest such pause.")
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Deaths of one process in a row after which the start fails. Once the mesh is "
        "ready, its processes are started again without end.",
    )
    hung_s: float = Field(
        default=15.0,
        gt=0,
        description="A process that has answered and is silent for so long is killed and started "
        "again; one that has not answered yet has ready_s.",
    )
    restart_reset_s: float = fixed(
        default=60.0, gt=0, description="Running this long resets the count of deaths."
    )
    nats_store_bytes: int = Field(
        default=2 * 1024**3, ge=1024 * 1024, description="Disk that JetStream may use."
    )
    store_probe_s: float = fixed(
        default=5.0,
        gt=0,
        description="How often a write of JetStream is probed. After two failures "
        "in a row NATS is started again, as soon as its disk has room.",
    )
    store_min_free_bytes: int = fixed(
        default=16 * 1024 * 1024, ge=0, description="Free disk that counts as room for JetStream."
    )
    redis_least_versions: tuple[str, ...] = Field(
        default=(
            "redis 6.2.20",
            "redis 7.2.11",
            "redis 7.4.6",
            "redis 8.0.4",
            "redis 8.2.2",
            "valkey 7.2.12",
            "valkey 8.0.7",
            "valkey 8.1.6",
            "valkey 9.0.3",
        ),
        description="Least version of a Redis or Valkey that `up` starts, for each release line; "
        "lines newer than all of a product's are taken, others are not.",
    )

    @field_validator("redis_least_versions")
    @classmethod
    def _are_releases(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if _RELEASE.fullmatch(name) is None:
                raise ValueError(f"{name!r} does not name a release such as 'valkey 8.1.6'")
        return names
