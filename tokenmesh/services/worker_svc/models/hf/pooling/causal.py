"""CausalPooler: a decoder of the general kind whose states are wanted, not its logits.

Prompts are cut into chunks over pages, share blocks and are admitted like any prompt that
generates.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.services.worker_svc.adapters.sites import AdapterSites
from tokenmesh.services.worker_svc.adapters.tree_sites import (
    add_sites,
    prefixes_of,
    site_problems,
)
from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.hf import experts
from tokenmesh.services.worker_svc.models.hf.check import (
    HALF_TOLERANCE,
    TOLERANCE,
    paged_logits,
    prompts,
)
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.media.language import prompt_positions
from tokenmesh.services.worker_svc.models.hf.mixers import FORMS
from tokenmesh.services.worker_svc.models.hf.model import media_arguments
from tokenmesh.services.worker_svc.models.hf.recognise import (
    FIRST_PAGE,
    FIRST_TOKENS,
    first_step,
    record,
)
from tokenmesh.services.worker_svc.models.hf.run import UnservedModel
from tokenmesh.services.worker_svc.models.hf.swap import swap
from tokenmesh.services.worker_svc.models.hf.tree import Tree, adapt
from tokenmesh.services.worker_svc.models.keeps import Grouping, LayerKeeps, window_groups
from tokenmesh.services.worker_svc.models.kv_store import KvStore, make_store
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import PoolHead, head_sites
from tokenmesh.shared.messages.media import MediaItem

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CausalPooler:
    """A decoder over paged keys and values, and its head. Implements `PoolModel`."""

    facts: HfFacts
    pooling: PoolingFacts
    tree: Tree
    keeps: tuple[LayerKeeps, ...]
    head: PoolHead
    sites: AdapterSites = field(default_factory=AdapterSites)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.tree.model.dtype
        return dtype

    @property
    def grouping(self) -> Grouping:
        return window_groups(self.keeps)

    def states(
        self, ids: torch.Tensor, _types: torch.Tensor | None, step: Step, store: KvStore
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.tree.embedding(ids)
        for patch in step.media.patches:
            patch.apply(hidden)
        self.tree.run.begin(step, store)
        self.sites.step.rows = step.adapters
        try:
            positions, more = media_arguments(hidden, step, self.facts)
            return self.tree.hidden_of(hidden[None], positions, **more)[0]
        finally:
            self.tree.run.end()
            self.sites.step.rows = None

    def positions_of(
        self, token_ids: Sequence[int], media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        if self.facts.media.position_rows == 1:
            return None
        return prompt_positions(self.tree.shell, token_ids, media)


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
    device = body.device
    expected = torch.cat(
        [body(input_ids=ids[None], use_cache=False).last_hidden_state[0]
         for ids in prompts(facts.vocab_size, device)]
    ).float()  # fmt: skip
    tree = adapt(body, facts.ropes)
    pooler = CausalPooler(facts, pooling, tree, tree.probe(), head)
    experts.take_over(tree.body, has_kernels)
    for port in tree.mixers:
        port.take_form(FORMS[0])
    modules = list(tree.body.modules())
    store = make_store(pooler.keeps, 3, FIRST_PAGE, 1, pooler.dtype, device)
    store.clear_blocks(torch.arange(3, device=device))
    ids = prompts(facts.vocab_size, device)[0][:FIRST_TOKENS]
    step = first_step(device)
    calls = record(modules, lambda: pooler.states(ids, None, step, store))
    problems = site_problems(tree.body, [*tree.mixers, *tree.indexers], calls)
    swap(modules, calls, has_kernels)
    pooler.sites.prefixes = prefixes_of(tree.shell, tree.body, body.base_model_prefix)
    pooler.sites.head = head_sites(head)
    add_sites(pooler.sites, tree.body, "", problems)
    _check(pooler, expected)
    return pooler


def _check(pooler: CausalPooler, expected: torch.Tensor) -> None:
    """Its states in chunks are those of whole prompts, with the fastest form of its mixers."""

    def states(ids: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
        return pooler.states(ids, None, step, store)

    limit = TOLERANCE if pooler.dtype == torch.float32 else HALF_TOLERANCE
    # on a GPU the others go from row to row on the host
    for form in FORMS if pooler.tree.mixers and not uses_triton(expected) else FORMS[:1]:
        for port in pooler.tree.mixers:
            port.take_form(form)
        ours = paged_logits(states, pooler, expected.device)
        error = float((ours - expected).norm() / expected.norm())
        if error <= limit:
            logger.info("chunks of %s are %.1e from the whole", pooler.facts.architecture, error)
            return
    raise UnservedModel(
        f"in chunks and batched its states are {error:.2g} away from those of the whole prompt, "
        f"and more than {limit:.2g} is not rounding"
    )
