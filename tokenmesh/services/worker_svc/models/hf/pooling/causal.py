"""CausalPooler: a decoder of the general kind whose states are wanted, not its logits.

Prompts are cut into chunks over pages, share blocks and are admitted like any prompt that
generates.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.hf.adapter_sites import prefixes_of
from tokenmesh.services.worker_svc.models.hf.build import replace_parts
from tokenmesh.services.worker_svc.models.hf.check import (
    HALF_TOLERANCE,
    TOLERANCE,
    Reference,
    prompts,
)
from tokenmesh.services.worker_svc.models.hf.embedding_factor import embedding_factor
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.model import Computed, HfModel
from tokenmesh.services.worker_svc.models.hf.tree import adapt
from tokenmesh.services.worker_svc.models.kv_store import KvStore
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import PoolHead, head_sites


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
    pooler = CausalPooler(
        facts, tree.probe(), tree, Computed(tree.body), pooling=pooling, head=head
    )
    pooler.sites.prefixes = prefixes_of(tree.shell, tree.body, body.base_model_prefix)
    pooler.sites.head = head_sites(head)
    replace_parts(pooler, expected, has_kernels)
    return pooler
