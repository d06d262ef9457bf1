"""The decoder: embeddings, layers, final norm, logits. One class for every family of its kind.

Shapes: T tokens of the step, N rows that need logits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.layers.mlp import Experts, Mlp
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.layers.step import HostStep, Patch, Step
from tokenmesh.engine.models.api import ModelFacts, Taps
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_store import KvStore, LayerPages
from tokenmesh.engine.models.native.attention import Attention, TurnedStep
from tokenmesh.engine.models.native.config import DecoderConfig, QueryScaling
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.native import Program, ProgramInputs, RopeTurns
from tokenmesh.kernels.rms_norm import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norm weights are float32; a norm that the family does not have is None."""

    attention: Attention
    mlp: Mlp | Experts
    attention_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None

    def forward(
        self,
        hidden: torch.Tensor,
        pending: torch.Tensor | None,
        step: TurnedStep,
        pages: LayerPages,
        config: DecoderConfig,
        ranks: Ranks = ALONE,
    ) -> torch.Tensor:
        """Add `pending`, the last layer's result, and one block to hidden [T, hidden], in place.

        Returns the other block's result: the next layer adds it where it reads hidden anyway.
        """
        x = _add_and_norm(hidden, pending, self.attention_norm, config)
        x = ranks.sum_(self.attention.forward(x, step, pages))
        if self.attention_post_norm is not None:
            x = rms_norm(x, self.attention_post_norm, config.rms_norm_eps)
        x = _add_and_norm(hidden, x, self.mlp_norm, config)
        x = ranks.sum_(self.mlp.forward(x))
        if self.mlp_post_norm is not None:
            x = rms_norm(x, self.mlp_post_norm, config.rms_norm_eps)
        return x


def _add_and_norm(
    hidden: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    config: DecoderConfig,
) -> torch.Tensor:
    """Add x to hidden in place; returns hidden's norm, or hidden without a norm."""
    eps, multiplier = config.rms_norm_eps, config.residual_multiplier
    if x is None:
        return hidden if weight is None else rms_norm(hidden, weight, eps)
    if weight is None:
        return hidden.add_(x, alpha=multiplier)
    return add_rms_norm(hidden, x, weight, eps, multiplier)


class Table(Protocol):
    """An embedding whose rows are read out of a packed weight."""

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """index [N] -> [N, hidden], a new tensor."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a model. Implements `Model`."""

    facts: ModelFacts
    config: DecoderConfig
    """The switches."""
    embedding: torch.Tensor | Table | None
    """[V, hidden], or the head's weight, which is the same; None on all stages but the first."""
    dtype: torch.dtype
    """It is the type of activations."""
    layers: Sequence[DecoderLayer]
    norm: torch.Tensor | None
    """The final one; None on all stages but the last."""
    head: Linear | None
    """None on all stages but the first."""
    rotaries: Sequence[Rotary]
    program: Program | None
    """The layers as a program of C kernels; None if unavailable for the model or the machine."""
    sites: AdapterSites = field(default_factory=AdapterSites)
    ranks: Ranks = ALONE
    """These are the ranks of which this one has a part of the heads, of the MLPs and of the
    vocabulary."""

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        return self.config.keeps

    @property
    def grouping(self) -> Grouping:
        return self.config.grouping

    @property
    def write_cross(self) -> None:
        return None

    @property
    def aligner(self) -> None:
        return None

    @property
    def has_program(self) -> bool:
        return self.program is not None

    @property
    def num_tap_layers(self) -> int:
        return len(self.layers)

    @property
    def takes_graphs(self) -> bool:
        return True

    def embed(self, token_ids: torch.Tensor, patches: Sequence[Patch] = ()) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], a new tensor with the patches in it.

        Whether the multiplier counts for those as well is the family's choice.
        """
        hidden = self._rows(token_ids)
        multiplier = self.config.embedding_multiplier
        if multiplier != 1.0 and not self.config.multiplies_patches:
            hidden.mul_(multiplier)
        for patch in patches:
            patch.apply(hidden)
        if multiplier != 1.0 and self.config.multiplies_patches:
            hidden.mul_(multiplier)
        return hidden

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding [T, hidden]; each is on one rank, and the others add zeros."""
        if self.ranks.world == 1:
            return self._own_rows(token_ids)
        part = self.ranks.padded_part(self.config.vocab_size)
        is_here = (token_ids >= part.start) & (token_ids < part.stop)
        hidden = self._own_rows((token_ids - part.start).masked_fill_(~is_here, 0))
        return self.ranks.sum_(hidden.masked_fill_(~is_here[:, None], 0))

    def _own_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embedding, torch.Tensor):
            return self.embedding.index_select(0, token_ids)
        assert self.embedding is not None, "only the first stage embeds"
        return self.embedding.rows(token_ids, self.dtype)

    def positions_of(
        self, token_ids: Sequence[int], media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        return None

    def forward(
        self, hidden: torch.Tensor, step: Step, store: KvStore, taps: Taps | None = None
    ) -> torch.Tensor:
        """See `Model.forward`; hidden [T, hidden] is overwritten."""
        tapped = {} if taps is None else dict(zip(taps.layers, taps.states.unbind(1), strict=True))
        final = self._run(hidden, step, store, tapped)
        if taps is not None and len(tapped) < len(taps.layers):
            # of a layer that is named twice, as 2, L // 2 and L - 3 of six do, one was written
            for number, states in zip(taps.layers, taps.states.unbind(1), strict=True):
                states.copy_(tapped[number])
        return final

    def _run(
        self, hidden: torch.Tensor, step: Step, store: KvStore, tapped: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        assert store.pool is not None
        if self.program is not None and isinstance(step, HostStep) and _runs_in_c(step):
            groups = self.config.grouping if self.config.windows is not None else None
            inputs = program_inputs(self.config, self.rotaries, step, store, groups)
            self.program.run(hidden, inputs, store.pool, tapped)
            return hidden
        turned = turned_step(self.config, self.rotaries, step)
        x = None
        self.sites.step.rows = step.adapters
        for number, layer in enumerate(self.layers):
            if number in tapped:
                tapped[number].copy_(hidden)
                if x is not None:
                    tapped[number].add_(x, alpha=self.config.residual_multiplier)
            x = layer.forward(hidden, x, turned, store.pages_of(number), self.config, self.ranks)
        self.sites.step.rows = None
        return _add_and_norm(hidden, x, self.norm, self.config)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [N, hidden] after `forward` -> float32 [N, V]: `out`, or a new tensor.

        [N, 0] on ranks that follow.
        """
        assert self.head is not None, "only the first stage has logits"
        if self.ranks.world > 1:
            own = linear(hidden, self.head, torch.float32)
            logits = self.ranks.gather(own, self.config.vocab_size, out)
        elif out is None or not out.is_cuda:
            logits = linear(hidden, self.head, torch.float32, out)
        else:
            logits = out.copy_(linear(hidden, self.head))
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        softcap = self.config.logits_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def program_inputs(
    config: DecoderConfig,
    rotaries: Sequence[Rotary],
    step: HostStep,
    store: KvStore,
    stage: Grouping | None = None,
) -> ProgramInputs:
    """Return what a program reads of a step. stage: its groups, where it may have no layers of the
    last ones, whose tables are then left out."""
    tables = [step.all_tables, *step.windowed_tables]
    if stage is not None:
        tables = tables[: 1 + max(stage.group_of)]
    return ProgramInputs(
        starts=step.starts,
        counts=step.counts,
        numbers=step.numbers,
        tables=tables,
        turns=[
            RopeTurns(rotary.table(step.longest), is_by_position=True)
            if rotary.has_table
            else RopeTurns(rotary.turns(step.positions, step.lengths), is_by_position=False)
            for rotary in rotaries
        ],
        query_scale=_query_scale(config.query_scaling, step),
        adapters=None if step.adapters is None else step.adapters.native.address,
        page_scales=store.scale_table,
    )


def turned_step(config: DecoderConfig, rotaries: Sequence[Rotary], step: Step) -> TurnedStep:
    """A step with the factors of its positions."""
    turns = [rotary.turns(step.positions, step.lengths) for rotary in rotaries]
    return TurnedStep(step, turns, _query_scale(config.query_scaling, step))


def _runs_in_c(step: HostStep) -> bool:
    return step.adapters is None or not step.adapters.has_experts


def _query_scale(scaling: QueryScaling | None, step: Step) -> torch.Tensor | None:
    """[T] float32; None for a model that does not scale its queries."""
    if scaling is None:
        return None
    return 1 + scaling.beta * torch.log(1 + torch.floor(step.positions / scaling.period))
