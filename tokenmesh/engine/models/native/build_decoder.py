"""Checkpoint -> Decoder: merge projections, order rows for rope, pack weights, layer by layer."""

import logging
from dataclasses import dataclass, field, replace

import torch

from tokenmesh.engine.adapters.sites import AdapterSites, TurnedRows
from tokenmesh.engine.layers.mlp import Mlp
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.checkpoint import Checkpoint, listed
from tokenmesh.engine.models.native.attention import Attention
from tokenmesh.engine.models.native.build_program import build_program
from tokenmesh.engine.models.native.config import LayerConfig, Names
from tokenmesh.engine.models.native.decoder import Decoder, DecoderLayer, Table
from tokenmesh.engine.models.native.read_config import NativeFacts
from tokenmesh.kernels.linear import Linear, pack, pack_codes
from tokenmesh.kernels.linear.formats.round import Grid, head_grid, rounded
from tokenmesh.kernels.native import NativeCodes, NativeWeight
from tokenmesh.kernels.quantized_linear import DeviceCodes
from tokenmesh.kernels.rope import interleave_rows
from tokenmesh.shared.allocator import trim_heap

logger = logging.getLogger(__name__)


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
    config, names = facts.config, names_in(facts, checkpoint)
    if facts.family.rounds_multiplier:
        multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype)
        config = replace(config, embedding_multiplier=float(multiplier))
    shape = (config.vocab_size, config.hidden_size)
    sites = AdapterSites(tuple(each.model for each in facts.names))
    loader = LayerLoader(facts, names, checkpoint, dtype, native, sites, facts.rounding)
    embedding, head = loader.ends(shape)
    num_bytes = checkpoint.num_bytes(names.ignored)
    layers = []
    for number, layer in enumerate(config.layers):
        layers.append(loader.load(number, layer))
        trim_heap()
        progress(checkpoint.bytes_read, num_bytes)
    norm = loader.norm(f"{names.model}norm", config.hidden_size)
    checkpoint.finish(names.ignored)
    for problem, decoded in loader.decoded.items():
        what = "weights of %d modules are decoded to %s, which saves no memory: %s: %s"
        logger.warning(what, len(decoded), dtype, problem, listed(decoded))
    progress(checkpoint.bytes_read, num_bytes)
    return Decoder(
        facts=facts,
        config=config,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        dtype=dtype,
        rotaries=[Rotary(rope, checkpoint.device) for rope in config.ropes],
        program=build_program(config, layers, norm, dtype),
        sites=sites,
    )


def names_in(facts: NativeFacts, checkpoint: Checkpoint) -> Names:
    """Of the prefixes that a family's checkpoints have, those of this one."""
    found = (each for each in facts.names if f"{each.model}embed_tokens.weight" in checkpoint)
    return next(found, facts.names[0])


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Reads one layer at a time."""

    facts: NativeFacts
    names: Names
    checkpoint: Checkpoint
    dtype: torch.dtype
    native: bool
    sites: AdapterSites
    rounding: Grid | None
    """What plain weights are rounded to."""
    decoded: dict[str, list[str]] = field(default_factory=dict)
    """Modules that no kernel of the GPU computes with, by the reason."""

    def ends(self, shape: tuple[int, int]) -> tuple[torch.Tensor | Table, Linear]:
        """Embedding and head. A head that the C kernels read serves as the embedding too."""
        table, head = f"{self.names.model}embed_tokens", f"{self.names.head}".removesuffix(".")
        # a tied checkpoint may bring its own head all the same; transformers believes the tensor
        if not self.facts.config.tied_embeddings or f"{head}.weight" in self.checkpoint:
            return self._table(table, shape), self._head(head, shape)
        if not self.native:
            embedding = self.checkpoint.take(f"{table}.weight", shape, self.dtype)
            return embedding, pack(embedding, None)
        tied = self._head(table, shape)
        weight = tied.weight
        if isinstance(weight, NativeWeight | NativeCodes):
            return weight, tied
        return self.checkpoint.take(f"{table}.weight", shape, self.dtype), tied

    def _table(self, name: str, shape: tuple[int, int]) -> torch.Tensor | Table:
        if self.native and self.checkpoint.is_encoded(f"{name}.weight"):
            weight = self._product([name], [shape[0]], shape[1], has_bias=False).weight
            if isinstance(weight, NativeWeight | NativeCodes):
                return weight
        return self.checkpoint.take(f"{name}.weight", shape, self.dtype)

    def _head(self, name: str, shape: tuple[int, int]) -> Linear:
        to = self.facts.rounding
        rounding = None if to is None else head_grid(to, self.checkpoint.device)
        loader = replace(self, rounding=rounding)
        return loader._product([name], [shape[0]], shape[1], has_bias=False)

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
            activation=config.activation,
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
        sizes = [
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        ]
        rotated = sizes[0] + sizes[1]
        given = sizes if len(parts) == len(sizes) else [sum(sizes)]
        order, turned = None, None
        if not self.facts.family.interleaved_rope:
            turned = TurnedRows(rotated, config.head_dim, config.ropes[0].rotary_dim)
            order = turned.turn(torch.arange(sum(sizes)))
        return self._linear(
            number, list(parts), given, config.hidden_size, config.qkv_bias, order, turned
        )

    def _qk_norm(self, prefix: str) -> torch.Tensor | None:
        config, names = self.facts.config, self.facts.family.names
        if config.qk_norm == "none":
            return None
        weights = []
        counts = (config.num_heads, config.num_kv_heads)
        for name, heads in zip((names.q_norm, names.k_norm), counts, strict=True):
            size = config.head_dim * (heads if config.qk_norm == "all" else 1)
            weight = self.norm(f"{prefix}{name}", size)
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
        self,
        number: int,
        names: list[str],
        sizes: list[int],
        inputs: int,
        has_bias: bool,
        order: torch.Tensor | None = None,
        turned: TurnedRows | None = None,
    ) -> Linear:
        """Projections of a layer that share an input, with a place for adapters."""
        within = [f"layers.{number}.{name}" for name in names]
        stored = [f"{self.names.model}{name}" for name in within]
        layer = self._product(stored, sizes, inputs, has_bias, order)
        self.sites.add(layer, within, sizes, inputs, turned)
        return layer

    def _product(
        self,
        names: list[str],
        sizes: list[int],
        inputs: int,
        has_bias: bool,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """Weights below each other, their outputs in `order`."""
        named = list(zip(names, sizes, strict=True))
        weights = [(f"{name}.weight", size) for name, size in named]
        bias = None
        if has_bias:
            biases = [(f"{name}.bias", size) for name, size in named]
            bias = self.checkpoint.take_rows(biases, (), self.dtype)
            bias = bias if order is None else bias[order.to(bias.device)]
        device = self.checkpoint.device
        is_encoded = self.checkpoint.is_encoded(weights[0][0])
        takes_codes = self.native or device.type == "cuda"
        codes = self.checkpoint.take_codes(weights, inputs) if takes_codes else None
        if codes is None:
            weight = self.checkpoint.take_rows(weights, (inputs,), self.dtype)
            weight = weight if order is None else weight[order.to(device)]
            if self.rounding is None or is_encoded:
                if is_encoded and device.type == "cuda":
                    problem = "its format has no codes, or modules of one input have several"
                    self.decoded.setdefault(problem, []).extend(names)
                return pack(weight, bias, self.native)
            codes = rounded(weight, self.rounding)
        else:
            codes = codes.to(device)
            codes = codes if order is None else codes.rows(order.to(device))
        if device.type == "cuda" and (found := DeviceCodes.problem(codes)) is not None:
            self.decoded.setdefault(found, []).extend(names)
        return pack_codes(codes, bias, self.dtype, self.native)

    def _norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        return self.norm(f"{prefix}{name}", self.facts.config.hidden_size)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """What a norm multiplies by."""
        weight = self.checkpoint.take(f"{name}.weight", (size,), torch.float32)
        return weight.add_(1.0) if self.facts.family.adds_one else weight
