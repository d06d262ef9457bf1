"""Checkpoint -> Decoder: merge projections, order rows for rope, pack weights, layer by layer."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.linear import Linear, pack
from tokenmesh.kernels.rope import interleave_rows
from tokenmesh.services.worker_svc.adapters.sites import AdapterSites, TurnedRows
from tokenmesh.services.worker_svc.layers.attention import Attention
from tokenmesh.services.worker_svc.layers.mlp import Mlp
from tokenmesh.services.worker_svc.layers.rotary import Rotary
from tokenmesh.services.worker_svc.models.api import Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.native.build_program import build_program
from tokenmesh.services.worker_svc.models.native.config import LayerConfig, Names
from tokenmesh.services.worker_svc.models.native.decoder import Decoder, DecoderLayer
from tokenmesh.services.worker_svc.models.native.read_config import NativeFacts
from tokenmesh.shared.allocator import trim_heap


def build_decoder(
    facts: NativeFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    native: bool = False,
) -> Decoder:
    """Load every tensor; `native`: for the C kernels, which have been started.

    Raises CheckpointError for any that is missing, misshapen or unknown.
    """
    config = facts.config
    names = next(
        (n for n in facts.names if f"{n.model}embed_tokens.weight" in checkpoint), facts.names[0]
    )
    shape = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.take(f"{names.model}embed_tokens.weight", shape, dtype)
    sites = AdapterSites(tuple(each.model for each in facts.names))
    loader = _LayerLoader(facts, names, checkpoint, dtype, native, sites)
    num_bytes = checkpoint.num_bytes(names.ignored)
    layers = []
    for number, layer in enumerate(config.layers):
        layers.append(loader.load(number, layer))
        trim_heap()
        progress(checkpoint.bytes_read, num_bytes)
    norm = checkpoint.take(f"{names.model}norm.weight", (config.hidden_size,), torch.float32)
    head_name = f"{names.head}weight"
    if config.tied_embeddings and head_name not in checkpoint:
        head = embedding
    else:
        # a tied checkpoint may bring its own all the same; transformers believes the tensor
        head = checkpoint.take(head_name, shape, dtype)
    checkpoint.finish(names.ignored)
    progress(checkpoint.bytes_read, num_bytes)
    return Decoder(
        facts=facts,
        config=config,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=pack(head, None, native),
        rotaries=[Rotary(rope, embedding.device) for rope in config.ropes],
        program=build_program(config, layers, norm),
        sites=sites,
    )


@dataclass(frozen=True, slots=True)
class _LayerLoader:
    """Reads one layer at a time."""

    facts: NativeFacts
    names: Names
    checkpoint: Checkpoint
    dtype: torch.dtype
    native: bool
    sites: AdapterSites

    def load(self, number: int, layer: LayerConfig) -> DecoderLayer:
        prefix = f"{self.names.model}layers.{number}."
        names, config = self.facts.family.names, self.facts.config
        hidden, inner = config.hidden_size, config.intermediate_size
        attention = Attention(
            config=config,
            layer=layer,
            qkv=self._qkv(number),
            out=self._linear(
                number, [names.out], [hidden], config.num_heads * config.head_dim, config.out_bias
            ),
            qk_norm=self._qk_norm(prefix),
        )
        parts = list(names.gate_up)
        sizes = [2 * inner // len(parts)] * len(parts)
        mlp = Mlp(
            gate_up=self._linear(number, parts, sizes, hidden, config.mlp_bias),
            down=self._linear(number, [names.down], [hidden], inner, config.mlp_bias),
        )
        return DecoderLayer(
            attention=attention,
            mlp=mlp,
            attention_norm=self._norm(prefix, names.attention_norm),
            attention_post_norm=self._norm(prefix, names.attention_post_norm),
            mlp_norm=self._norm(prefix, names.mlp_norm),
            mlp_post_norm=self._norm(prefix, names.mlp_post_norm),
        )

    def _qkv(self, number: int) -> Linear:
        config, parts = self.facts.config, self.facts.family.names.qkv
        prefix = f"{self.names.model}layers.{number}."
        sizes = [
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        ]
        rotated = sizes[0] + sizes[1]
        given = sizes if len(parts) == len(sizes) else [sum(sizes)]
        weight, bias = self._rows(
            [prefix + name for name in parts], given, config.hidden_size, config.qkv_bias
        )
        for rows in (weight, bias) if bias is not None else (weight,):
            rows[:rotated] = self._pairs(rows[:rotated])
        layer, turned = pack(weight, bias, self.native), None
        if not self.facts.family.interleaved_rope:
            turned = TurnedRows(rotated, config.head_dim, config.ropes[0].rotary_dim)
        names = [f"layers.{number}.{name}" for name in parts]
        self.sites.add(layer, names, given, config.hidden_size, turned)
        return layer

    def _qk_norm(self, prefix: str) -> torch.Tensor | None:
        config, names = self.facts.config, self.facts.family.names
        if config.qk_norm == "none":
            return None
        weights = []
        counts = (config.num_heads, config.num_kv_heads)
        for name, heads in zip((names.q_norm, names.k_norm), counts, strict=True):
            size = config.head_dim * (heads if config.qk_norm == "all" else 1)
            weight = self.checkpoint.take(f"{prefix}{name}.weight", (size,), torch.float32)
            by_head = self._pairs(weight).view(-1, config.head_dim)
            weights.append(by_head.expand(heads, config.head_dim))
        return torch.cat(weights)

    def _pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows of whole heads into the order that the rope kernel rotates."""
        if self.facts.family.interleaved_rope:
            return rows
        config = self.facts.config
        return interleave_rows(rows, config.head_dim, config.ropes[0].rotary_dim)

    def _linear(
        self, number: int, names: list[str], sizes: list[int], inputs: int, has_bias: bool
    ) -> Linear:
        within = [f"layers.{number}.{name}" for name in names]
        stored = [f"{self.names.model}{name}" for name in within]
        layer = pack(*self._rows(stored, sizes, inputs, has_bias), self.native)
        self.sites.add(layer, within, sizes, inputs)
        return layer

    def _rows(
        self, names: list[str], sizes: list[int], inputs: int, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights [sum(sizes), inputs] of projections that share an input, and their biases."""
        take_rows, named = self.checkpoint.take_rows, list(zip(names, sizes, strict=True))
        weights = [(f"{name}.weight", size) for name, size in named]
        biases = [(f"{name}.bias", size) for name, size in named]
        weight = take_rows(weights, (inputs,), self.dtype)
        return weight, take_rows(biases, (), self.dtype) if has_bias else None

    def _norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        size = (self.facts.config.hidden_size,)
        return self.checkpoint.take(f"{prefix}{name}.weight", size, torch.float32)
