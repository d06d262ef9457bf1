"""Indexers, which choose the keys that each token attends to, over index keys in blocks.

The module's own forward scores and chooses, row by row, once the keys of all rows are written.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenmesh.kernels.mla_attention import latent_write
from tokenmesh.services.worker_svc.models.hf.attention import PORT
from tokenmesh.services.worker_svc.models.hf.cache import RunCache
from tokenmesh.services.worker_svc.models.hf.run import Run
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel

_TAKES: Final = (
    *("hidden_states", "q_resid", "position_embeddings"),
    *("attention_mask", "position_ids", "past_key_values"),
)


@dataclass(frozen=True, slots=True)
class AnyMask:
    """What an attention module slices for its indexer, which does not look at it here."""

    mask: object
    """As the module got it."""

    def __getitem__(self, _index: object) -> "AnyMask":
        return self


@dataclass(slots=True)
class IndexerPort:
    """One indexer; where its keys are is its module's PORT."""

    run: Run
    cache: RunCache
    module: Any
    inner: Any
    width: int = 0
    """Features of a key; the probe sees it."""
    _context: torch.Tensor | None = None
    """[1, context, D] of the row at work; None: keys of the step are written."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        """int32 [1, T, chosen]: positions of the row that each token is in; -1 is none."""
        named = {**dict(zip(_TAKES, given, strict=False)), **named}
        step, hidden = self.run.step, named["hidden_states"]
        self._context = None
        self._choose(named, slice(None), hidden.new_zeros(1, 1, 1))  # writes all keys
        if step is None:
            return torch.zeros(1, hidden.shape[1], 1, dtype=torch.int32, device=hidden.device)
        # a recorded step would have none; see `HfModel.takes_graphs`
        assert step.starts
        keys, device = getattr(self.module, PORT).tensor, hidden.device
        ends = [start + count for start, count in zip(step.starts, step.counts, strict=True)]
        shape = (1, hidden.shape[1], min(self.module.index_topk, max(ends)))
        chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
        first = 0
        for start, end, table in zip(step.starts, ends, step.row_tables, strict=True):
            tokens = slice(first, first + end - start)
            first = tokens.stop
            blocks = table[: -(-end // keys.shape[1])].long()
            self._context = keys[blocks].flatten(0, 1)[None, :end]
            positions = torch.arange(start, end, device=device)[:, None]
            mask = torch.arange(end, device=device)[None] <= positions
            found = self._choose(named, tokens, mask[None])[0]
            chosen[0, tokens, : found.shape[-1]] = torch.where(found <= positions, found, -1)
        return chosen

    def _update(self, keys: torch.Tensor) -> torch.Tensor:
        if self._context is not None:
            return self._context
        self.width, step = int(keys.shape[-1]), self.run.step
        if step is not None:
            kept = getattr(self.module, PORT).tensor
            latent_write(keys[0].to(kept.dtype), kept, step.token_slots)
        return keys[:, :1]

    def _choose(self, named: dict[str, Any], tokens: slice, mask: torch.Tensor) -> torch.Tensor:
        cos, sin = named["position_embeddings"]
        self.run.index = self._update
        try:
            found: torch.Tensor = self.inner(
                named["hidden_states"][:, tokens],
                named["q_resid"][:, tokens],
                (cos[:, tokens], sin[:, tokens]),
                mask,
                None,
                past_key_values=self.cache,
            )
        finally:
            self.run.index = None
        return found


def wrap_indexer(module: torch.nn.Module, run: Run, cache: RunCache) -> IndexerPort:
    """Replace the module's forward on this instance. Raises UnservedModel for another form."""
    parameters = tuple(inspect.signature(module.forward).parameters)
    if parameters != _TAKES or not hasattr(module, "index_topk"):
        raise UnservedModel(f"{type(module).__name__} is an indexer of another form")
    port = IndexerPort(run, cache, module, module.forward)
    module.forward = port.forward
    return port
