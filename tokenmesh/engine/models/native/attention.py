"""Self-attention with paged keys and values.

Shapes: T tokens, H query heads, K kv heads, D head_dim. The merged projection yields each token's
query heads, key heads and value heads in one buffer that norms and rope change in place.
"""

from dataclasses import dataclass

import torch

from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.models.kv_store import LayerPages
from tokenmesh.engine.models.native.config import DecoderConfig, LayerConfig
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.paged_attention import paged_attention, variant_of
from tokenmesh.kernels.qk_norm_rope_kv_write import HeadNorm, qk_norm_rope_kv_write
from tokenmesh.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class TurnedStep:
    """A step with what its positions do to queries and keys. T tokens."""

    step: Step
    turns: list[torch.Tensor]
    """For each of DecoderConfig.ropes: [T, 1, pairs] complex64."""
    query_scale: torch.Tensor | None
    """[T] float32 factor on queries, for models that grow them with the position."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer's attention."""

    config: DecoderConfig
    layer: LayerConfig
    qkv: Linear
    out: Linear
    qk_norm: torch.Tensor | None
    """float32 [H + K, D]: the norm weight of each query and key head; None without norms."""
    sinks: torch.Tensor | None = None
    """float32 [H]: for each query head a score without a value; None: there are none."""

    def forward(self, x: torch.Tensor, turned: TurnedStep, layer_pages: LayerPages) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the keys and values of x into its pages."""
        pages, group, (k_scale, v_scale) = layer_pages
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        buffer = linear(x, self.qkv).view(len(x), heads + 2 * kv_heads, config.head_dim)
        norm = None
        if self.qk_norm is not None and config.qk_norm == "head":
            norm = HeadNorm(self.qk_norm, config.rms_norm_eps, config.norms_after_rope)
        elif self.qk_norm is not None:
            self._normalize(buffer, self.qk_norm)
        step = turned.step
        turns = None if self.layer.rope is None else turned.turns[self.layer.rope]
        query = qk_norm_rope_kv_write(
            buffer,
            pages,
            step.slots(pages, group),
            turns,
            norm,
            turned.query_scale,
            k_scale,
            v_scale,
        )
        prepared = step.attention(self.layer.window, pages, group)
        variant = variant_of(config.attention_softcap, self.sinks, k_scale, v_scale)
        mixed = paged_attention(query, pages, prepared, config.attention_scale, variant)
        return linear(mixed, self.out)

    def _normalize(self, buffer: torch.Tensor, weight: torch.Tensor) -> None:
        """Normalize [T, H + 2K, D] in place, over all query heads and over all key heads."""
        config = self.config
        assert not config.norms_after_rope, "a norm over all heads comes before rope"
        for heads in (slice(0, config.num_heads), slice(config.num_heads, len(weight))):
            part, over_all = buffer[:, heads], weight[heads].flatten()
            part.copy_(rms_norm(part.flatten(1), over_all, config.rms_norm_eps).view(part.shape))
