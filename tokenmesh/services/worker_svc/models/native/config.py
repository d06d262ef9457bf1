"""DecoderConfig: everything that tells one decoder from another, as switches."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
QkNorm = Literal["none", "head", "all"]
"""none; over each head's features; over all heads' features at once."""


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


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None
    """Positions a query sees, its own included; None: all before it."""
    rope: int | None
    """Index into DecoderConfig.ropes; None: no positions in this layer."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow with the position: 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with gated silu MLPs and RMS norms."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position: int
    """Longest sequence the checkpoint was made for, rope scaling included."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norms_after_rope: bool = False
    attention_scale: float = 1.0
    embedding_multiplier: float = 1.0
    multiplies_patches: bool = False
    """Whether that counts for embeddings that do not come from the table, such as images."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    query_scaling: QueryScaling | None = None

    def min_length(self, num_prompt: int, num_known: int) -> int:
        """The length that the first tokens of a row count with, where keys depend on it.

        num_known tokens are known when its KV is computed from the start. Past a boundary every key
        is one of the whole sequence; else an output token's is that of the length it made.
        """
        has_boundary = any(rope.boundary is not None for rope in self.ropes)
        return num_known if has_boundary else num_prompt
