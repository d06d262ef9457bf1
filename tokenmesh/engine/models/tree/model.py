"""HfModel: a module tree of transformers with weights, as the runner sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.layers.step import Patch, Step
from tokenmesh.engine.models.alignment import RowAlignments
from tokenmesh.engine.models.api import CrossWriter, Taps
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps, window_groups
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.tree.expert_slots import ExpertSlots
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.media.language import media_arguments, prompt_positions
from tokenmesh.engine.models.tree.tree import Tree
from tokenmesh.engine.ranks.ranks import ALONE, Ranks


@dataclass(slots=True)
class HfModel:
    facts: HfFacts
    keeps: tuple[LayerKeeps, ...]
    tree: Tree
    body: "Computed"
    is_whole: bool = True
    """It tells whether its weights are still its own."""
    waits_for: str | None = None
    """An operation of its code that would wait for a GPU; None: none was seen."""
    sites: AdapterSites = field(default_factory=AdapterSites)
    expert_slots: Sequence[ExpertSlots] = ()
    """Slots of the layers whose experts move between ranks; empty: none does."""
    ranks: Ranks = ALONE
    """This one of them has a part of the weights."""

    @property
    def sites_prefix(self) -> str:
        """Return what stands before the names of the body's modules in those of the tree."""
        shell, body = self.tree.shell, self.tree.body
        within = next(name for name, module in shell.named_modules() if module is body)
        parts = (self.tree.model.base_model_prefix, *((within,) if within else ()))
        return ".".join(parts) + "."

    @property
    def dtype(self) -> torch.dtype:
        table: Any = self.tree.embedding.weight
        return table.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        weights = self.tree.body.parameters()
        return next(each.device for each in weights if not each.is_meta)

    @property
    def takes_graphs(self) -> bool:
        """See `Model.takes_graphs`; indexers go from row to row by the host's numbers."""
        return self.waits_for is None and not self.tree.indexers

    @property
    def grouping(self) -> Grouping:
        return window_groups(self.keeps)

    @property
    def write_cross(self) -> CrossWriter | None:
        return self._write_cross if self.tree.crosses else None

    @property
    def aligner(self) -> RowAlignments | None:
        return self.tree.run.alignments

    def results(self, ids: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
        """Return what is compared with transformers: the logits of all tokens."""
        return self.logits(self.forward(self.embed(ids), step, store))

    def _write_cross(self, states: torch.Tensor, store: KvStore, row: int) -> None:
        states = states.to(self.device, self.dtype)
        for port in self.tree.crosses:
            port.write(states, store, row)

    @property
    def has_program(self) -> bool:
        return False

    def embed(self, token_ids: torch.Tensor, patches: Sequence[Patch] = ()) -> torch.Tensor:
        """See `Model.embed`; what transformers multiplies embeddings of ids by is in it."""
        hidden = self.tree.embed(token_ids)
        for patch in patches:
            patch.apply(hidden)
        return hidden

    def positions_of(
        self, token_ids: Sequence[int], media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        if self.facts.media.position_rows == 1:
            return None
        return prompt_positions(self.tree.shell, token_ids, media)

    @property
    def num_tap_layers(self) -> int:
        layers = getattr(self.tree.body, "layers", None)
        return len(layers) if isinstance(layers, torch.nn.ModuleList) else 0

    def forward(
        self, hidden: torch.Tensor, step: Step, store: KvStore, taps: Taps | None = None
    ) -> torch.Tensor:
        self.tree.run.begin(step, store)
        self.sites.step.rows = step.adapters
        hooks = [] if taps is None else self._tap(taps)
        try:
            positions, more = media_arguments(hidden, step, self.facts.media)
            return self.tree.hidden_of(hidden[None], positions, **more)[0]
        finally:
            self.tree.run.end()
            self.sites.step.rows = None
            for hook in hooks:
                hook.remove()

    def _tap(self, taps: Taps) -> list[RemovableHandle]:
        """Copy what the layers are given to `taps`."""
        layers: Any = self.tree.body.layers

        def hook_of(target: torch.Tensor) -> Callable[..., None]:
            def copy(_layer: torch.nn.Module, args: Any, named: Any) -> None:
                given = args[0] if args else named["hidden_states"]
                target.copy_(given[0])

            return copy

        return [
            layers[number].register_forward_pre_hook(hook_of(target), with_kwargs=True)
            for number, target in zip(taps.layers, taps.states.unbind(1), strict=True)
        ]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.logits`; by the tree's own head, with all that it does to logits.

        [N, 0] on ranks that follow.
        """
        self.body.hidden = hidden[None]
        logits: torch.Tensor = self.tree.model(inputs_embeds=hidden[None], use_cache=False).logits
        self.body.hidden = None
        if self.ranks.world > 1 and not self.ranks.is_alone:
            return self.ranks.gather(logits[0].float(), self.facts.vocab_size, out)
        return logits[0].float() if out is None else out.copy_(logits[0])


class Computed(torch.nn.Module):
    """Stands where the tree's body was, so that its head runs on states that are there."""

    hidden: torch.Tensor | None
    """The states; None: those that it is given as embeddings."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = None
        self.__dict__["_body"] = body  # not a submodule
        if isinstance(getattr(body, "pooler", None), torch.nn.Module):
            # a classifier's own; add_module would find it by `__getattr__` already
            self._modules["pooler"] = body.pooler  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Heads read a few attributes of the body; some read a body nested in it."""
        found = getattr(self.__dict__["_body"], name)
        return self if isinstance(found, PreTrainedModel) else found

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor | None = None, **_named: Any) -> Any:
        """As if the body had computed the states."""
        states, pooler = self.hidden, self._modules.get("pooler")
        states = inputs_embeds if states is None else states
        return _Output(states, None if pooler is None else pooler(states))


@dataclass(eq=False)
class _Output:
    """A body's output by name or by number; None for all that a head may pass on."""

    last_hidden_state: torch.Tensor | None
    pooler_output: torch.Tensor | None

    def __getitem__(self, index: int | slice) -> Any:
        # what follows the states is passed on
        both = (self.last_hidden_state, self.pooler_output)
        return () if isinstance(index, slice) else both[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
