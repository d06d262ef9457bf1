"""LoraSettings: which adapters a worker serves, and how many of them at a time."""

import json
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tokenmesh.shared.config.fixed import fixed

MAX_LORA_RANK: Final = 512


def _module_of(text: str) -> tuple[str, str]:
    if text.startswith("{"):
        given = json.loads(text)
        name, path = given.get("name"), given.get("path")
    else:
        name, _, path = text.partition("=")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise ValueError(f"{text!r} is not name=path")
    return name, path


class LoraSettings(BaseModel):
    """Limits of adapters in worker_svc. Names that vLLM has mean what they mean there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_lora: bool = Field(default=False, description="Serve LoRA adapters of the model.")
    lora_modules: dict[str, str] = Field(
        default_factory=dict,
        description="Adapters that are there from the start: the name that requests use, and the "
        "directory.",
    )
    max_loras: int = Field(
        default=8, ge=1, le=1024, description="Adapters whose streams may run in one batch."
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        description="Adapters whose matrices are in memory, those without streams included; the "
        "least recently used one is read again when it is needed. Default: as many as max_loras.",
    )
    max_lora_rank: int = Field(
        default=16, ge=1, le=MAX_LORA_RANK, description="Largest rank; above it one is refused."
    )
    max_adapters: int = Field(
        default=256, ge=1, le=4096, description="Names of adapters; beyond, loading is refused."
    )
    allowed_dirs: list[str] = Field(
        default_factory=list,
        description="Directories below which POST /v1/load_lora_adapter may name a path; those of "
        "lora_modules and lora_dir can be named without it.",
    )
    lora_dir: str | None = Field(
        default=None,
        description="A request for an unknown model loads the adapter of that name from here.",
    )
    load_timeout_s: float = fixed(
        default=60.0, gt=0, description="Reading one adapter; then loading has failed."
    )
    sync_interval_s: float = fixed(
        default=2.0,
        gt=0,
        description="How often a worker looks in Redis for adapters that the others were given.",
    )

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _read_modules(cls, value: object) -> object:
        """Also as vLLM's flag has it: a list of `name=path` or of JSON objects."""
        if not isinstance(value, list):
            return value
        found: dict[str, str] = {}
        for each in value:
            name, path = _module_of(str(each))
            if name in found:
                raise ValueError(f"two adapters are named {name!r}")
            found[name] = path
        return found

    @property
    def num_in_memory(self) -> int:
        """Adapters whose matrices are kept."""
        return max(self.max_loras, self.max_cpu_loras or 0)
