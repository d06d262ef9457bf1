"""Tree: transformers' module tree of a checkpoint, with our attention and cache under it."""

import inspect
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tokenmesh.services.worker_svc.layers.rope_config import RopeConfig
from tokenmesh.services.worker_svc.models.hf import experts
from tokenmesh.services.worker_svc.models.hf.attention import ATTENTION
from tokenmesh.services.worker_svc.models.hf.cache import RunCache
from tokenmesh.services.worker_svc.models.hf.indexer import IndexerPort, wrap_indexer
from tokenmesh.services.worker_svc.models.hf.mixers import MixerPort, calls, wrap
from tokenmesh.services.worker_svc.models.hf.mla import is_latent, keep_latents
from tokenmesh.services.worker_svc.models.hf.probe import PROBE, probe
from tokenmesh.services.worker_svc.models.hf.rope import by_row
from tokenmesh.services.worker_svc.models.hf.run import Run
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.keeps import LayerKeeps

logger = logging.getLogger(__name__)
_PROBE_TOKENS = 3


@dataclass(slots=True)
class Tree:
    """A `...ForCausalLM` of transformers, adapted. Its weights may still be on the meta device."""

    model: PreTrainedModel
    body: torch.nn.Module
    """Everything but the head."""
    embedding: torch.nn.Module
    run: Run
    cache: RunCache
    cache_name: str
    mixers: list[MixerPort]
    indexers: list[IndexerPort]

    def hidden_of(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """embeddings [1, T, H], positions [1, T] -> final hidden states [1, T, H]."""
        named: dict[str, Any] = {self.cache_name: self.cache}
        out = self.body(inputs_embeds=embeddings, position_ids=positions, use_cache=True, **named)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def probe(self) -> tuple[LayerKeeps, ...]:
        """Attach every port; what the layers keep. Raises UnservedModel."""
        device = next(self.body.parameters()).device
        table: Any = self.embedding.weight
        shape = (1, _PROBE_TOKENS, table.shape[-1])
        embeddings = torch.empty(shape, device=device, dtype=self.model.dtype)
        positions = torch.arange(_PROBE_TOKENS, device=device)[None]
        self._run_by(PROBE, PROBE)
        try:
            forward = partial(self.hidden_of, embeddings, positions)
            seen = probe(self.run, self.mixers, self.indexers, forward)
        except UnservedModel:
            raise
        except Exception as error:
            logger.info("the probe failed", exc_info=error)
            raise UnservedModel(_reason_of(error)) from error
        self._run_by(ATTENTION, experts.NAME)
        return seen.attach()

    def _run_by(self, attention: str, experts_name: str) -> None:
        """Name the functions to every module: each reads its own config object."""
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation = attention
                config._experts_implementation = experts_name


def adapt(model: PreTrainedModel, ropes: tuple[RopeConfig, ...] = ()) -> Tree:
    """Replace what touches the cache. Raises UnservedModel."""
    run = Run()
    cache = RunCache(run)
    mixers, indexers = [], []
    for module in model.modules():
        if calls(module, "update_conv_state"):
            mixers.append(wrap(module, run, cache))
        elif calls(module, "update_indexer"):
            indexers.append(wrap_indexer(module, run, cache))
        elif is_latent(module):
            keep_latents(module)
    body: torch.nn.Module = model.base_model
    by_row(body, ropes, run)
    embedding = model.get_input_embeddings()
    return Tree(model, body, embedding, run, cache, _cache_name(body), mixers, indexers)


def _cache_name(body: torch.nn.Module) -> str:
    parameters = inspect.signature(body.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise UnservedModel("its code in transformers has no cache")


def _reason_of(error: Exception) -> str:
    """Why a pass without weights failed, with the class whose code it was in."""
    module, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        module = owner if isinstance(owner, torch.nn.Module) else module
        trace = trace.tb_next
    where = "its code" if module is None else f"the code of {type(module).__name__}"
    if "meta tensor" in str(error):
        return f"{where} reads numbers off tensors, which a pass without weights cannot follow"
    return f"{where} fails over a paged cache: {error}"
