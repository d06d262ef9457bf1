"""Settings of models on demand: they sleep until a request names them."""

import re
from math import inf, isnan
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

NEVER: Final = inf
"""A model with this keep-alive, in seconds, does not sleep by itself."""

_LONGEST_S: Final = 100 * 365 * 86400.0
_UNITS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_NUMBER: Final = r"(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})"
_PART: Final = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h)", re.ASCII)
_DURATION: Final = re.compile(
    rf"[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ns|us|µs|ms|s|m|h)){{1,8}})", re.ASCII
)


def duration_s(value: str | float) -> float:
    """Seconds of `5m`, `1h30m`, `90` or 90, as Ollama reads `keep_alive`; `NEVER` if negative.

    Raises ValueError for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, str | float | int):
        raise ValueError("not a duration")
    if isinstance(value, str):
        text = value.strip()
        if not _DURATION.fullmatch(text):
            raise ValueError("should be a duration such as 5m, a number of seconds, or -1 for ever")
        parts = _PART.findall(text)
        seconds = sum(float(each) * _UNITS[unit] for each, unit in parts) if parts else float(text)
        is_negative = text.startswith("-")
    else:
        seconds, is_negative = float(value), value < 0
    if isnan(seconds):
        raise ValueError("not a duration")
    return NEVER if is_negative or seconds > _LONGEST_S else seconds


class OnDemandModel(BaseModel):
    """When a model sleeps; a part of ModelSettings."""

    on_demand: bool = Field(
        default=False,
        description="The model sleeps until a request names it, and again after keep_alive.",
    )
    keep_alive: str | float = Field(
        default="5m",
        description="How long a model on demand stays awake without requests: 5m, 1h30m or a "
        "number of seconds; 0: it sleeps at once; negative: until others need its place.",
    )

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: str | float) -> str | float:
        duration_s(value)
        return value

    @property
    def keep_alive_s(self) -> float:
        return duration_s(self.keep_alive)


class OnDemandSettings(BaseModel):
    """A worker whose model is on demand. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots_dir: Path | None = Field(
        default=None,
        description="Directory of lock files: workers on demand that share it share max_awake. "
        "`up` makes one.",
    )
    max_awake: int = Field(
        default=1, ge=1, description="Workers that share slots_dir and may be awake at a time."
    )
