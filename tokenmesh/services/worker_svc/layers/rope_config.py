"""RopeConfig: one kind of rotary positions."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotary positions. Unused fields keep their neutral values."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    max_position: int
    """max_position_embeddings of the checkpoint."""
    original_max_position: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def boundary(self) -> int | None:
        """Sequences longer than this turn all of their keys by other factors than shorter ones."""
        return self.original_max_position if self.kind == "longrope" else None

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt of a prompt: its own, and its length where keys depend on it."""
        is_plain = salt is None and num_prompt <= self.max_position
        if self.kind != "dynamic" or is_plain:
            return salt
        return f"length {max(num_prompt, self.max_position)}: {salt or ''}"
