"""EncoderTree: a module tree whose tokens see their whole prompt, run on many prompts at once.

Trees that attend through transformers' interface take all tokens of a step as one row; others are
run on batches of prompts of one length, through their own code.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tokenmesh.services.worker_svc.models.hf.pooling.rows import (
    ROWS,
    ROWS_PROBE,
    RowsRun,
    batches_of,
    groups_of,
    probe,
)
from tokenmesh.services.worker_svc.models.hf.run import Run, RunCache, UnservedModel

_PROBE_TOKENS = 3


@dataclass(slots=True)
class EncoderTree:
    """A tree, adapted. Its weights may still be on the meta device."""

    model: PreTrainedModel
    body: PreTrainedModel
    """Everything but a classifier."""
    run: RowsRun
    offset: int
    """Position of a prompt's first token."""
    takes_types: bool
    takes_positions: bool
    takes_cache: bool
    is_flat: bool = True
    """Whether all prompts of a step are one row."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "EncoderTree":
        """Adapt and probe a tree. Raises UnservedModel."""
        body: PreTrainedModel = model.base_model
        if hasattr(body, "encoder") and getattr(body.config, "is_encoder_decoder", False):
            raise UnservedModel("it has a decoder")
        names = inspect.signature(body.forward).parameters
        tree = cls(
            *(model, body, RowsRun(), _position_offset(body)),
            takes_types="token_type_ids" in names,
            takes_positions="position_ids" in names,
            takes_cache="past_key_values" in names and "encoder_hidden_states" not in names,
        )
        tree.is_flat = tree.takes_positions and tree._probe() > 0
        tree._attend_by(ROWS if tree.is_flat else "eager")
        return tree

    def _probe(self) -> int:
        """How many modules attend through transformers' interface; each is given a port."""
        if not self.body._supports_attention_backend:
            return 0
        self._attend_by(ROWS_PROBE)
        ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=self.model.device)
        try:
            return probe(self.run, lambda: self.states(ids, None, [_PROBE_TOKENS]))
        except UnservedModel:
            raise
        except Exception as error:
            kind = type(self.body).__name__
            raise UnservedModel(f"the code of {kind} fails on a probe: {error}") from error

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, counts: Sequence[int]
    ) -> torch.Tensor:
        """ids [T] of prompts of these lengths, sorted by them -> final states [T, H]."""
        if types is None:
            types = torch.zeros_like(ids)
        if not self.is_flat:
            return self._by_length(ids, types, counts)
        groups = groups_of(counts)
        self.run.batches = batches_of(groups)
        places = [torch.arange(each.length).repeat(each.rows) for each in groups]
        positions = (torch.cat(places) + self.offset).to(ids.device)
        try:
            return self._run(ids[None], types[None], positions[None])[0]
        finally:
            self.run.batches = ()

    def _by_length(
        self, ids: torch.Tensor, types: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        states = []
        for each in groups_of(counts):
            shape = (each.rows, each.length)
            found = self._run(ids[each.tokens].view(shape), types[each.tokens].view(shape), None)
            states.append(found.flatten(0, 1))
        return torch.cat(states)

    def _run(
        self, ids: torch.Tensor, types: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        named: dict[str, Any] = {}
        if self.takes_types:
            named["token_type_ids"] = types
        if self.takes_cache:
            # without one, decoders look for several prompts in the positions of one
            named |= {"past_key_values": RunCache(Run()), "use_cache": True}
        if positions is not None and self.takes_positions:
            named["position_ids"] = positions
        found = self.body(input_ids=ids, **named)
        states: torch.Tensor = found[0] if isinstance(found, tuple) else found.last_hidden_state
        return states

    def longest(self, longest: int) -> int:
        """Tokens of the longest prompt: a table of positions may begin with those of padding."""
        tables = [getattr(each, "position_embeddings", None) for each in self.body.modules()]
        sizes = [t.num_embeddings for t in tables if isinstance(t, torch.nn.Embedding)]
        return min([longest, *(size - self.offset for size in sizes)])

    def _attend_by(self, name: str) -> None:
        """Each module reads its own config object."""
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation = name


def _position_offset(body: torch.nn.Module) -> int:
    """Where a prompt's positions begin: behind the padding's, where a table of positions has one.

    The check at load compares with the tree itself, which numbers them by its own rule.
    """
    for module in body.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0
