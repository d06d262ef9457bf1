"""Embeddings and logits of a divided model for a head, which is whole on the leader.

The leader says what the head reads, and every rank computes its part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.runner import StepLogits, TorchRunner
from tokenmesh.engine.layers.step import HostStep, Patch
from tokenmesh.engine.models.api import LanguageModel, ModelFacts
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.ranks.frames import HeadRead
from tokenmesh.engine.ranks.link import FollowerLink, LeaderLink
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.engine.sampling.sampler import RowSampler
from tokenmesh.shared.errors import Unavailable


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """It has what a head reads of a model, as `LanguageModel` has it, and no weights: a head that
    took these would take the leader's part for all of them."""

    model: LanguageModel
    link: LeaderLink
    ranks: Ranks

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def embed(self, token_ids: torch.Tensor, patches: Sequence[Patch] = ()) -> torch.Tensor:
        self.link.send_head_read(HeadRead(token_ids=token_ids.tolist()))
        return self.model.embed(token_ids, patches)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden.to(self.dtype).contiguous()
        self.link.send_head_read(HeadRead(num_states=len(hidden)))
        self.ranks.share(hidden)
        return self.model.logits(hidden, out)


def shared_ends(link: LeaderLink, ranks: Ranks, model: LanguageModel) -> LanguageModel:
    """Return what a head on the leader has in the place of the model."""
    ends: Any = SharedEnds(model, link, ranks)
    return ends  # type: ignore[no-any-return]


class FollowingRunner(TorchRunner):
    """A rank that follows: in steps that a head on the leader reads, it computes for the head."""

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        rows: HostRows,
        sampler: RowSampler,
        *,
        link: FollowerLink,
        ranks: Ranks,
        has_head: bool,
        **options: Any,
    ) -> None:
        super().__init__(model, store, rows, sampler, **options)
        self._link, self._ranks, self._has_head = link, ranks, has_head

    def _is_followed(self, plan: StepPlan) -> bool:
        return self._has_head and any(entry.is_followed for entry in plan.scheduled)

    @torch.inference_mode()
    def _propose(
        self,
        plan: StepPlan,
        step: HostStep,
        drawn: dict[int, list[int]],
        logits: StepLogits,
        taken: Mapping[int, int],
    ) -> dict[int, list[int]]:
        """Compute what the head reads until it has drafted. The leader keeps its drafts."""
        model = self._model
        while (read := self._link.head_reads.get()) is not None:
            if read.token_ids:
                model.embed(torch.tensor(read.token_ids))
            elif read.num_states:
                hidden = torch.empty(read.num_states, model.facts.hidden_size, dtype=model.dtype)
                self._ranks.share(hidden)
                model.logits(hidden)
            else:
                return {}
        raise Unavailable("the leader has ended")
