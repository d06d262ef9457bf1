"""Checkpoint -> Decoder: merge projections, order rows for rope, pack weights, layer by layer."""

import logging
from dataclasses import dataclass, field, replace

import torch

from tokenmesh.engine.adapters.sites import (
    ELSEWHERE,
    AdapterSites,
    Site,
    TakenWeight,
    TurnedRows,
)
from tokenmesh.engine.layers.mlp import Mlp
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.checkpoint import Checkpoint, listed
from tokenmesh.engine.models.native.attention import Attention
from tokenmesh.engine.models.native.build_program import build_program
from tokenmesh.engine.models.native.config import DecoderConfig, LayerConfig, Names
from tokenmesh.engine.models.native.decoder import Decoder, DecoderLayer, Table
from tokenmesh.engine.models.native.divide import divided
from tokenmesh.engine.models.native.pieces import Piece, pieces_of, read_pieces
from tokenmesh.engine.models.native.read_config import NativeFacts
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
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
    ranks: Ranks = ALONE,
) -> Decoder:
    """Load every tensor, or the parts of this rank; `native`: for the C kernels, which have been
    started.

    Raises CheckpointError for any that is missing, misshapen or unknown.
    """
    config, names = divided(facts.config, ranks), names_in(facts, checkpoint)
    if facts.family.rounds_multiplier:
        multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype)
        config = replace(config, embedding_multiplier=float(multiplier))
    shape = (config.vocab_size, config.hidden_size)
    sites = AdapterSites(tuple(each.model for each in facts.names))
    loader = LayerLoader(
        facts, config, names, checkpoint, dtype, native, sites, facts.rounding, ranks
    )
    pipe, ignored = ranks.pipe, (*names.ignored, *_of_other_stages(facts, names, ranks))
    embedding, head = loader.ends(shape) if pipe.is_first else (None, None)
    num_bytes = checkpoint.num_bytes(ignored)
    layers = []
    for number, layer in enumerate(config.layers, config.first_layer):
        layers.append(loader.load(number, layer))
        trim_heap()
        progress(checkpoint.bytes_read, num_bytes)
    loader.note_elsewhere()
    norm = loader.norm(f"{names.model}norm", config.hidden_size) if pipe.is_last else None
    checkpoint.finish(ignored)
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
        program=build_program(config, layers, norm, dtype, ranks),
        sites=sites,
        ranks=ranks,
    )


def _of_other_stages(facts: NativeFacts, names: Names, ranks: Ranks) -> list[str]:
    """Prefixes of tensors that this rank's stage does not have."""
    pipe, count = ranks.pipe, len(facts.config.layers)
    own = pipe.layers(count)
    found = [
        f"{names.model}{names.layer.format(number)}" for number in range(count) if number not in own
    ]
    if not pipe.is_first:
        found += [f"{names.model}embed_tokens.", names.head]
    return found if pipe.is_last else [*found, f"{names.model}norm."]


def names_in(facts: NativeFacts, checkpoint: Checkpoint) -> Names:
    """Return, of the prefixes that a family's checkpoints have, those of this one."""
    found = (each for each in facts.names if f"{each.model}embed_tokens.weight" in checkpoint)
    return next(found, facts.names[0])


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Reads one layer at a time."""

    facts: NativeFacts
    config: DecoderConfig
    """It is the config of this rank's part."""
    names: Names
    checkpoint: Checkpoint
    dtype: torch.dtype
    native: bool
    sites: AdapterSites
    rounding: Grid | None
    """It holds what plain weights are rounded to."""
    ranks: Ranks = ALONE
    decoded: dict[str, list[str]] = field(default_factory=dict)
    """Modules that no kernel of the GPU computes with, by the reason."""
    joined: bool = False
    """It tells whether the attention reads two hidden states side by side."""

    def ends(self, shape: tuple[int, int]) -> tuple[torch.Tensor | Table, Linear]:
        """Embedding and head. A head that the C kernels read serves as the embedding too."""
        table, head = f"{self.names.model}embed_tokens", f"{self.names.head}".removesuffix(".")
        # a tied checkpoint may bring its own head all the same; transformers believes the tensor
        if not self.facts.config.tied_embeddings or f"{head}.weight" in self.checkpoint:
            return self._table(table, shape), self._head(head, shape)
        if not self.native:
            embedding = self._embedding(table, shape)
            return embedding, pack(embedding, None)
        tied = self._head(table, shape)
        weight = tied.weight
        if isinstance(weight, NativeWeight | NativeCodes):
            return weight, tied
        return self._embedding(table, shape), tied

    def _vocabulary(self, name: str, shape: tuple[int, int]) -> list[Piece]:
        return [Piece(name, shape[0], (self.ranks.padded_part(shape[0]),))]

    def _embedding(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        pieces = self._vocabulary(f"{name}.weight", shape)
        return read_pieces(self.checkpoint, pieces, shape[1:], self.dtype)

    def _table(self, name: str, shape: tuple[int, int]) -> torch.Tensor | Table:
        if self.native and self.checkpoint.is_encoded(f"{name}.weight"):
            weight = self._product(self._vocabulary(name, shape), shape[1], has_bias=False).weight
            if isinstance(weight, NativeWeight | NativeCodes):
                return weight
        return self._embedding(name, shape)

    def _head(self, name: str, shape: tuple[int, int]) -> Linear:
        to = self.facts.rounding
        rounding = None if to is None else head_grid(to, self.checkpoint.device)
        loader = replace(self, rounding=rounding)
        return loader._product(self._vocabulary(name, shape), shape[1], has_bias=False)

    def load(self, number: int, layer: LayerConfig) -> DecoderLayer:
        prefix = f"{self.names.model}{self.names.layer.format(number)}"
        names, config, whole = self.facts.family.names, self.config, self.facts.config
        hidden, inner, heads = whole.hidden_size, whole.intermediate_size, whole.num_heads
        attention = Attention(
            config=config,
            layer=layer,
            qkv=self._qkv(number),
            out=self._inward(number, names.out, heads * whole.head_dim, config.out_bias),
            qk_norm=self._qk_norm(prefix),
        )
        mlp = Mlp(
            gate_up=self._linear(number, self._gate_up_pieces(), hidden, config.mlp_bias),
            down=self._inward(number, names.down, inner, config.mlp_bias),
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

    def note_elsewhere(self) -> None:
        """Announce layers of other stages to adapters, which have no effect on them here."""
        whole, names = self.facts.config, self.facts.family.names
        hidden = whole.hidden_size
        shapes = {names.out: (hidden, whole.num_heads * whole.head_dim)}
        shapes[names.down] = hidden, whole.intermediate_size
        pieces = (*self._qkv_pieces(), *self._gate_up_pieces())
        shapes |= {each.name: (each.size, hidden) for each in pieces}
        own, count = self.ranks.pipe.layers(len(whole.layers)), len(whole.layers)
        for number in (each for each in range(count) if each not in own):
            for name, shape in shapes.items():
                self.sites.by_name[f"layers.{number}.{name}"] = Site(ELSEWHERE, 0, *shape)

    def _qkv_pieces(self) -> list[Piece]:
        whole, size = self.facts.config, self.config.head_dim
        counts = [whole.num_heads, whole.num_kv_heads, whole.num_kv_heads]
        kv_part = self.ranks.kv_part(whole.num_kv_heads)
        taken = [
            slice(part.start * size, part.stop * size)
            for part in (self.ranks.part(whole.num_heads), kv_part, kv_part)
        ]
        return pieces_of(self.facts.family.names.qkv, [size * each for each in counts], taken)

    def _gate_up_pieces(self) -> list[Piece]:
        inner = self.facts.config.intermediate_size
        names = self.facts.family.names.gate_up
        return pieces_of(names, [inner, inner], [self.ranks.part(inner)] * 2)

    def _qkv(self, number: int) -> Linear:
        config, size, pieces = self.config, self.config.head_dim, self._qkv_pieces()
        order, turned = None, None
        if not self.facts.family.interleaved_rope:
            # in the order of this rank's outputs: heads are turned one by one
            rotated = size * (config.num_heads + config.num_kv_heads)
            turned = TurnedRows(rotated, size, config.ropes[0].rotary_dim)
            order = turned.turn(torch.arange(rotated + size * config.num_kv_heads))
        inputs = config.hidden_size * (1 + self.joined)
        return self._linear(number, pieces, inputs, config.qkv_bias, order, turned)

    def _qk_norm(self, prefix: str) -> torch.Tensor | None:
        config, names = self.config, self.facts.family.names
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
        pieces: list[Piece],
        inputs: int,
        has_bias: bool,
        order: torch.Tensor | None = None,
        turned: TurnedRows | None = None,
        columns: slice | None = None,
    ) -> Linear:
        """Projections of a layer that share an input, with a place for adapters."""
        within = [f"layers.{number}.{piece.name}" for piece in pieces]
        prefix = f"{self.names.model}{self.names.layer.format(number)}"
        stored = [replace(piece, name=f"{prefix}{piece.name}") for piece in pieces]
        layer = self._product(stored, inputs, has_bias, order, columns)
        width = inputs if columns is None else columns.stop - columns.start
        sizes, read = [piece.num_taken for piece in pieces], columns or slice(0, inputs)
        taken = [TakenWeight(piece.size, inputs, piece.taken, (read,)) for piece in pieces]
        self.sites.add(layer, within, sizes, width, turned, taken if self.ranks.world > 1 else ())
        return layer

    def _inward(self, number: int, name: str, inputs: int, has_bias: bool) -> Linear:
        """A projection back to hidden, by this rank's part of its inputs: one of a sum, where the
        bias counts once."""
        hidden, ranks = self.config.hidden_size, self.ranks
        columns = None if ranks.world == 1 else ranks.part(inputs)
        pieces = [Piece(name, hidden, (slice(0, hidden),))]
        return self._linear(number, pieces, inputs, has_bias, columns=columns)

    def _product(
        self,
        pieces: list[Piece],
        inputs: int,
        has_bias: bool,
        order: torch.Tensor | None = None,
        columns: slice | None = None,
    ) -> Linear:
        """Weights below each other, their outputs in `order`."""
        names = [piece.name for piece in pieces]
        weights = [(f"{piece.name}.weight", piece.size) for piece in pieces]
        bias = self._bias(pieces, order, columns) if has_bias else None
        device = self.checkpoint.device
        is_encoded = self.checkpoint.is_encoded(weights[0][0])
        takes_codes = self.native or device.type == "cuda"
        codes = None
        if takes_codes:
            taken = [piece.taken for piece in pieces]
            codes = self.checkpoint.take_codes(weights, inputs, taken, columns)
        is_rounded = self.rounding is not None and not is_encoded
        if codes is None:
            plain = [replace(piece, name=f"{piece.name}.weight") for piece in pieces]
            # what is rounded has scales of all its inputs
            read = None if is_rounded else columns
            weight = read_pieces(self.checkpoint, plain, (inputs,), self.dtype, read)
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
        if columns is not None and codes.shape[1] == inputs:
            part = codes.columns(columns)
            if part is None:
                self.decoded.setdefault("an order of inputs cannot be divided", []).extend(names)
                return pack(codes.decoded()[:, columns].to(self.dtype), bias, self.native)
            codes = part
        if device.type == "cuda" and (found := DeviceCodes.problem(codes)) is not None:
            self.decoded.setdefault(found, []).extend(names)
        return pack_codes(codes, bias, self.dtype, self.native)

    def _bias(
        self, pieces: list[Piece], order: torch.Tensor | None, columns: slice | None
    ) -> torch.Tensor | None:
        """None where another rank adds it."""
        biases = [replace(piece, name=f"{piece.name}.bias") for piece in pieces]
        bias = read_pieces(self.checkpoint, biases, (), self.dtype)
        if columns is not None and not self.ranks.leads:
            return None
        return bias if order is None else bias[order.to(bias.device)]

    def _norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        return self.norm(f"{prefix}{name}", self.facts.config.hidden_size)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return what a norm multiplies by."""
        weight = self.checkpoint.take(f"{name}.weight", (size,), torch.float32)
        return weight.add_(1.0) if self.facts.family.adds_one else weight
