"""CausalPooler: a decoder of the general kind whose states are wanted, not its logits.

Prompts are cut into chunks over pages, share blocks and are admitted like any prompt that
generates.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.heads import PoolHead, head_sites
from tokenmesh.engine.models.tree.adapter_sites import prefixes_of
from tokenmesh.engine.models.tree.build import replace_parts
from tokenmesh.engine.models.tree.check import (
    HALF_TOLERANCE,
    TOLERANCE,
    Reference,
    prompts,
)
from tokenmesh.engine.models.tree.embedding_factor import embedding_factor
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.model import Computed, HfModel
from tokenmesh.engine.models.tree.tree import adapt
from tokenmesh.engine.ranks.ranks import ALONE, Ranks


@dataclass(slots=True, kw_only=True)
class CausalPooler(HfModel):
    """A decoder over paged keys and values, and its head. Implements `PoolModel`."""

    pooling: PoolingFacts
    head: PoolHead

    @property
    def sites_prefix(self) -> str:
        """None: `sites.prefixes` are what may stand there."""
        return ""

    def states(
        self, ids: torch.Tensor, _types: torch.Tensor | None, step: Step, store: KvStore
    ) -> torch.Tensor:
        return self.forward(self.embed(ids, step.media.patches), step, store)

    def results(self, ids: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
        """The states, which are what is pooled."""
        return self.states(ids, None, step, store)


@torch.inference_mode()
def causal_pooler(
    facts: HfFacts,
    pooling: PoolingFacts,
    head: PoolHead,
    body: PreTrainedModel,
    has_kernels: bool,
    ranks: Ranks = ALONE,
) -> CausalPooler:
    """Over our memory, with the parts replaced that ours are faster than. Raises UnservedModel.

    body: the decoder without what is behind its states.
    """
    factor = embedding_factor(body, prompts(facts.vocab_size, body.device)[0])
    whole = [
        body(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        for ids in prompts(facts.vocab_size, body.device)
    ]
    limit = TOLERANCE if body.dtype == torch.float32 else HALF_TOLERANCE
    expected = Reference(torch.cat(whole).float(), limit, "states")
    tree = adapt(body, facts.ropes)
    tree.embedding_factor = factor
    with ranks.alone():
        keeps = tree.probe()
    computed = Computed(tree.body)
    pooler = CausalPooler(facts, keeps, tree, computed, ranks=ranks, pooling=pooling, head=head)
    pooler.sites.prefixes = prefixes_of(tree.shell, tree.body, body.base_model_prefix)
    pooler.sites.head = head_sites(head)
    replace_parts(pooler, expected, has_kernels)
    return pooler
