"""DecoderConfig: everything in which decoders differ, as switches; and names of their tensors."""

from dataclasses import dataclass
from typing import Literal

from tokenmesh.engine.layers.mlp import Activation
from tokenmesh.engine.layers.rotary import RopeConfig
from tokenmesh.engine.models.keeps import (
    Grouping,
    LayerKeeps,
    Pages,
    stage_groups,
    window_groups,
)
from tokenmesh.kernels.moe import Routing


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Module names within one layer."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three projections, or one that is already merged."""
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    """Read only when the config says that there are such norms."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Prefixes of a checkpoint's tensors."""

    model: str = "model."
    head: str = "lm_head."
    layer: str = "layers.{}."
    """Behind `model`: of a layer, by its number."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that another service reads."""


QkNorm = Literal["none", "head", "all"]
"""none; over each head's features; over all heads' features at once."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """It holds what may differ from layer to layer."""

    window: int | None
    """Positions a query sees, its own included; None: all before it."""
    rope: int | None
    """Index into DecoderConfig.ropes; None: no positions in this layer."""
    routing: Routing | None = None
    """Routing to the experts of this layer; None: its MLP is dense."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow with the position: 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with gated MLPs or experts, and RMS norms."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of dense layers' MLPs; 0 without dense layers."""
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
    activation: Activation = "silu"
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    embedding_multiplier: float = 1.0
    multiplies_patches: bool = False
    """It tells whether embeddings that do not come from the table, such as images, are multiplied
    too."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    """Softcap of the divided logits, in the same way."""
    query_scaling: QueryScaling | None = None
    first_layer: int = 0
    """The number that the first of `layers` has in the checkpoint, where this is one stage."""
    windows: tuple[int | None, ...] | None = None
    """Window groups of all stages together; None: there is one stage."""

    @property
    def grouping(self) -> Grouping:
        """Return which layers share a block table."""
        if self.windows is None:
            return window_groups(self.keeps)
        return stage_groups(self.keeps, self.windows)

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        """Return what each layer keeps between steps."""
        shape = (self.num_kv_heads, self.head_dim, self.head_dim)
        return tuple((Pages(*shape, layer.window),) for layer in self.layers)
