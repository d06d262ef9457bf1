"""Self-attention with paged keys and values.

Shapes: T tokens, H query heads, K kv heads, D head_dim. The merged projection yields each token's
query heads, key heads and value heads in one buffer that norms and rope change in place.
"""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.kv_write import kv_write
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.paged_attention import paged_attention
from tokenmesh.kernels.rms_norm import rms_norm
from tokenmesh.kernels.rope import rotate
from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.config import DecoderConfig, LayerConfig


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer's attention."""

    config: DecoderConfig
    layer: LayerConfig
    qkv: Linear
    out: Linear
    qk_norm: torch.Tensor | None
    """float32 [H + K, D]: the norm weight of each query and key head; None without norms."""

    def forward(self, x: torch.Tensor, step: Step, pages: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the keys and values of x into `pages`."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        buffer = linear(x, self.qkv).view(len(x), heads + 2 * kv_heads, config.head_dim)
        query_key = buffer[:, : heads + kv_heads]
        if self.qk_norm is not None and not config.norms_after_rope:
            self._normalize(query_key, self.qk_norm)
        if self.layer.rope is not None:
            rotate(query_key, step.turns[self.layer.rope])
        if self.qk_norm is not None and config.norms_after_rope:
            self._normalize(query_key, self.qk_norm)
        query = buffer[:, :heads]
        if step.query_scale is not None:
            query = query * step.query_scale.to(query.dtype).view(-1, 1, 1)
        kv_write(buffer[:, heads:], pages, step.slots)
        prepared = step.attention(self.layer.window, pages)
        return linear(paged_attention(query, pages, prepared, config.attention_scale), self.out)

    def _normalize(self, query_key: torch.Tensor, weight: torch.Tensor) -> None:
        """Normalize [T, H + K, D] in place, over each head or over all heads of a kind."""
        eps = self.config.rms_norm_eps
        if self.config.qk_norm == "head":
            query_key.copy_(rms_norm(query_key, weight, eps))
            return
        for heads in (slice(0, self.config.num_heads), slice(self.config.num_heads, None)):
            part = query_key[:, heads]
            part.copy_(rms_norm(part.flatten(1), weight[heads].flatten(), eps).view(part.shape))
