"""EncoderTree: a module tree whose tokens see their whole prompt, run on many prompts at once.

Trees that attend through transformers' interface take all tokens of a step as one row; others are
run on batches of prompts of one length, through their own code.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.models.tree.pooling.rows import (
    PASS_TOKENS,
    ROWS,
    ROWS_PROBE,
    RowsRun,
    batches_of,
    groups_of,
    probe,
)
from tokenmesh.engine.models.tree.run import Run, RunCache, UnservedModel
from tokenmesh.kernels.lora import AdapterRows

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
    """It tells whether all prompts of a step are one row."""
    is_native: bool = False
    """It tells whether the C kernels compute attention."""
    sites: AdapterSites = field(default_factory=AdapterSites)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "EncoderTree":
        """Adapt and probe a tree. Raises UnservedModel."""
        body: PreTrainedModel = model.base_model
        if hasattr(body, "encoder") and getattr(body.config, "is_encoder_decoder", False):
            raise UnservedModel("it has a decoder")
        names = inspect.signature(body.forward).parameters
        tree = cls(
            model,
            body,
            RowsRun(),
            _position_offset(body),
            takes_types="token_type_ids" in names,
            takes_positions="position_ids" in names,
            takes_cache="past_key_values" in names and "encoder_hidden_states" not in names,
        )
        tree.is_flat = tree.takes_positions and tree._probe() > 0
        tree._attend_by(ROWS if tree.is_flat else "eager")
        return tree

    def _probe(self) -> int:
        """Return how many modules attend through transformers' interface; each is given a port."""
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
        self,
        ids: torch.Tensor,
        types: torch.Tensor | None,
        counts: Sequence[int],
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """ids [T] of prompts of these lengths, sorted by them -> final states [T, H]."""
        if types is None:
            types = torch.zeros_like(ids)
        if not self.is_flat:
            return self._by_length(ids, types, counts, adapters)
        parts, first, row = [], 0, 0
        for rows in _parts_of(counts):
            tokens = slice(first, first + sum(counts[row : row + rows]))
            with self._adapted(adapters, tokens):
                parts.append(self._flat(ids[tokens], types[tokens], counts[row : row + rows]))
            first, row = tokens.stop, row + rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @contextmanager
    def _adapted(self, adapters: AdapterRows | None, tokens: slice) -> Iterator[None]:
        """Apply adapters in a pass over these tokens of the step."""
        if adapters is not None:
            self.sites.step.rows = adapters.within(tokens.start, tokens.stop)
        try:
            yield
        finally:
            self.sites.step.rows = None

    def _flat(self, ids: torch.Tensor, types: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """All prompts as one row."""
        with self.rows(counts):
            return self._run(ids[None], types[None], self._positions(ids, counts)[None])[0]

    def _positions(self, ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[T]: of each prompt's tokens; those of padding, which a text may spell, take none."""
        if not self.offset:
            places = [torch.arange(each.length).repeat(each.rows) for each in groups_of(counts)]
            return torch.cat(places).to(ids.device)
        padding = self.offset - 1
        is_counted = (ids != padding).long()
        places_of_all = is_counted.cumsum(0)
        lengths = torch.tensor(counts, device=ids.device)
        firsts = lengths.cumsum(0) - lengths
        before = (places_of_all - is_counted)[firsts]
        before = before.repeat_interleave(lengths, output_size=len(ids))
        return (places_of_all - before) * is_counted + padding

    @contextmanager
    def rows(self, counts: Sequence[int]) -> Iterator[None]:
        """Within it the tree's modules attend to rows of these lengths."""
        if self.is_native:
            self.run.firsts = torch.tensor([0, *counts]).cumsum(0)
        else:
            self.run.batches = batches_of(groups_of(counts), self.model.device)
        try:
            yield
        finally:
            self.run.batches, self.run.firsts = (), None

    def _by_length(
        self,
        ids: torch.Tensor,
        types: torch.Tensor,
        counts: Sequence[int],
        adapters: AdapterRows | None,
    ) -> torch.Tensor:
        states = []
        for each in groups_of(counts):
            shape = (each.rows, each.length)
            with self._adapted(adapters, each.tokens):
                found = self._run(
                    ids[each.tokens].view(shape), types[each.tokens].view(shape), None
                )
            states.append(found.flatten(0, 1))
        return torch.cat(states)

    @property
    def pooler(self) -> torch.nn.Module | None:
        """The part of a classifier that is kept in the body."""
        found: torch.nn.Module | None = getattr(self.body, "pooler", None)
        return found

    def passes(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Rows of each pass of `states`, and tokens of each row."""
        if not self.is_flat:
            return [(each.rows, each.length) for each in groups_of(counts)]
        ends = list(accumulate(_parts_of(counts)))
        return [(1, sum(counts[first:end])) for first, end in pairwise([0, *ends])]

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


def _parts_of(counts: Sequence[int]) -> Iterator[int]:
    """Yield how many prompts each pass computes."""
    rows, tokens = 0, 0
    for count in counts:
        if rows and tokens + count > PASS_TOKENS:
            yield rows
            rows, tokens = 0, 0
        rows, tokens = rows + 1, tokens + count
    yield rows


def _position_offset(body: torch.nn.Module) -> int:
    """Where a prompt's positions begin: behind the padding's, where a table of positions has one.

    The check at load compares with the tree itself, which numbers them by its own rule.
    """
    for module in body.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0
