"""EagleHead: a few decoder layers that read a token together with a hidden state before it.

Shapes: T tokens, H the head's hidden size, V the model's vocabulary, D the head's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps, one_group
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.native.build_program import ProgramWriter, fits_program
from tokenmesh.engine.models.native.config import DecoderConfig
from tokenmesh.engine.models.native.decoder import DecoderLayer, program_inputs, turned_step
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.native import Program
from tokenmesh.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class Joint:
    """It says how the first layer of EAGLE-3 reads a token and a state: normalized, side by
    side."""

    token_norm: torch.Tensor
    state_norm: torch.Tensor
    adds_normed: bool
    """It holds what the layer adds to: the normalized state; else the state as it is."""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head of EAGLE or EAGLE-3. Implements `DraftModel`."""

    config: DecoderConfig
    dtype: torch.dtype
    target: LanguageModel
    taps: tuple[int, ...]
    """See `Taps.layers`; empty: it reads the model's final states."""
    merge: Linear | None
    """EAGLE: [token | state] -> H. EAGLE-3: the states of `taps` side by side -> H; None: one state
    as it is."""
    layers: Sequence[DecoderLayer]
    rotaries: Sequence[Rotary]
    joint: Joint | None
    """None for EAGLE."""
    norm: torch.Tensor | None
    """It is the norm of what logits are computed from."""
    embedding: torch.Tensor | None
    """[V, H]; None: the model's own."""
    head: Linear | None
    """H -> D; None: the model's own."""
    program: Program | None
    """The layers as a program of C kernels, over states, or over tokens and states side by side;
    None if unavailable for the head or the machine."""
    token_ids: torch.Tensor | None
    """[D] int64 ids of what the head computes logits of; None: all V, in order."""
    shift: int = 1
    position_rows: int = 1

    @property
    def max_position(self) -> int:
        return self.config.max_position

    @property
    def vocab_size(self) -> int:
        return self.target.facts.vocab_size

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        return self.config.keeps

    @property
    def grouping(self) -> Grouping:
        return one_group(self.keeps)

    def states(self, hidden: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
        if self.joint is None:
            return hidden
        found = hidden if taps is None else taps.flatten(1)
        return found if self.merge is None else linear(found, self.merge)

    def embed(self, token_ids: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        assert states is not None
        if self.embedding is None:
            tokens = self.target.embed(token_ids)
        else:
            tokens = self.embedding.index_select(0, token_ids)
        both = torch.cat([tokens, states], dim=-1)
        if self.joint is not None:
            return both
        assert self.merge is not None
        return linear(both, self.merge)

    def forward(self, hidden: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        if self.program is not None and store.pool is not None:
            inputs = program_inputs(self.config, self.rotaries, step, store)
            self.program.run(hidden, inputs, store.pool)
            return hidden[:, -self.config.hidden_size :]
        turned = turned_step(self.config, self.rotaries, step)
        config, pending = self.config, None
        for number, layer in enumerate(self.layers):
            pages = store.pages_of(number)
            if number or self.joint is None:
                pending = layer.forward(hidden, pending, turned, pages, config)
                continue
            eps, joint = config.rms_norm_eps, self.joint
            tokens, states = hidden.chunk(2, dim=-1)
            normed = rms_norm(states.contiguous(), joint.state_norm, eps)
            x = torch.cat([rms_norm(tokens.contiguous(), joint.token_norm, eps), normed], dim=-1)
            hidden = (normed if joint.adds_normed else states).add(
                layer.attention.forward(x, turned, pages), alpha=config.residual_multiplier
            )
            assert layer.mlp_norm is not None
            pending = layer.mlp.forward(rms_norm(hidden, layer.mlp_norm, eps))
        if pending is None:
            return hidden
        return hidden.add_(pending, alpha=config.residual_multiplier)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            hidden = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        if self.head is None:
            return self.target.logits(hidden)
        logits = linear(hidden, self.head, torch.float32)
        if self.token_ids is None:
            return logits
        whole = torch.full((len(hidden), self.vocab_size), float("-inf"))
        return whole.index_copy_(1, self.token_ids, logits)


def build_head_program(
    config: DecoderConfig,
    layers: Sequence[DecoderLayer],
    joint: Joint | None,
    dtype: torch.dtype,
) -> Program | None:
    """`EagleHead.forward`; None where the C kernels do not take the head."""
    if not fits_program(config, layers):
        return None
    if joint is not None and any(layer.mlp_norm is None for layer in layers):
        return None
    writer = ProgramWriter(config, one_group(config.keeps))
    if joint is not None:
        writer.join(joint.token_norm, joint.state_norm, adds_normed=joint.adds_normed)
    for number, (layer, layer_config) in enumerate(zip(layers, config.layers, strict=True)):
        writer.attention_block(number, layer, layer_config)
        writer.mlp_block(layer)
    return writer.program(dtype)
