"""Names: where a family keeps its tensors. A norm without a name is a norm the family lacks."""

from dataclasses import dataclass


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
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that another service reads."""
