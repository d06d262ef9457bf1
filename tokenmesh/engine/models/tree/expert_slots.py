"""The slots of a layer's experts on all ranks, whose experts move while the model runs.

A rank has equally many slots. An expert may lie in several: its tokens take turns among the copies.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from tokenmesh.engine.ranks.placement import Move
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.kernels.native.experts import NativeExperts
from tokenmesh.shared.errors import ConfigError

SLOTS: Final = "tokenmesh_slots"
"""The attribute of a module of experts that has them."""
_PARAM: Final = "worker.enable_eplb"


class ExpertSlots:
    """Used by the compute thread, but for `counts` and `experts`, which another one may read."""

    def __init__(self, module: Any, ranks: Ranks, redundant: int) -> None:
        """module: of this rank's experts, in the order of their numbers."""
        self._module, self._ranks = module, ranks
        own = module.num_experts
        self.num_experts = own * ranks.world
        self.each = own
        """Slots of a rank."""
        self._spare = redundant // ranks.world
        with torch.inference_mode(mode=False):  # another thread sets them to 0
            self.counts = torch.zeros(self.num_experts, dtype=torch.int64)
        """Tokens of each expert since they were last set to 0."""
        self._staged: list[torch.Tensor] = []
        self.experts: list[int] = []
        """The expert of each slot, ranks one after the other."""
        self._set(list(range(self.num_experts)))

    def add_spare(self) -> None:
        """Once the weights are packed: further slots, which begin as copies of a rank's first
        experts. Raises ConfigError for weights that cannot be moved."""
        port = getattr(self._module, "port", None)
        if port is None or not all(
            isinstance(each, NativeExperts | torch.Tensor) for each in port[:2]
        ):
            what = "quantized experts, and those that are not computed by our kernels"
            raise ConfigError(f"enable_eplb: {what}, are not moved between ranks", param=_PARAM)
        rank, world, own = self._ranks.rank, self._ranks.world, self.each
        if self._spare:
            index = torch.arange(own + self._spare) % own
            self._module.port = tuple(_chosen(each, index) for each in port)
        self.each += self._spare
        firsts = range(0, self.num_experts, own)
        self._set([first + slot % own for first in firsts for slot in range(self.each)])
        assert len(self.experts) == world * self.each > rank

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T, k] of experts -> slots of this rank; others are below 0, or too large."""
        if ids.is_meta:
            return ids
        if not self._ranks.is_alone:
            self.counts += torch.bincount(ids.flatten(), minlength=self.num_experts)
        turn = torch.arange(len(ids))[:, None] % self._copies[ids]
        slots: torch.Tensor = self._places[ids, turn] - self._ranks.rank * self.each
        return slots

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(each.nbytes for each in self._tensors(0))

    @torch.inference_mode()
    def move(self, move: Move, first: int, end: int) -> None:
        """Bring bytes [first, end) of an expert to its new slot; with the last ones it is there.

        All ranks call it in one order.
        """
        rank, (source, target) = self._ranks.rank, _rank_and_place(move, self.each)
        pairs = [(source, target), (target, source)] if move.swaps else [(source, target)]
        if not first:
            self._staged = [torch.empty(0, dtype=torch.uint8) for _ in pairs]
            for number, (_, (there, _)) in enumerate(pairs):
                if there == rank:
                    self._staged[number] = torch.empty(self.num_bytes, dtype=torch.uint8)
        sent = []
        for number, ((here, slot), (there, _)) in enumerate(pairs):
            if here == rank:
                data = self._bytes(slot, first, end)
                if there == rank:
                    self._staged[number][first:end] = data
                else:
                    sent.append(self._ranks.group.send([data], there, number))
        for number, ((here, _), (there, _)) in enumerate(pairs):
            if there == rank != here:
                room = self._staged[number][first:end]
                self._ranks.group.recv([room], here, number).wait()
        for each in sent:
            each.wait()
        if end == self.num_bytes:
            for number, (_, (there, slot)) in enumerate(pairs):
                if there == rank:
                    self._put(slot, self._staged[number])
            self._staged = []
            experts = list(self.experts)
            experts[move.target] = self.experts[move.source]
            if move.swaps:
                experts[move.source] = self.experts[move.target]
            self._set(experts)

    def _set(self, experts: list[int]) -> None:
        places: dict[int, list[int]] = defaultdict(list)
        for slot, expert in enumerate(experts):
            places[expert].append(slot)
        most = max(map(len, places.values()))
        rows = [places[each] + [0] * (most - len(places[each])) for each in range(self.num_experts)]
        self._places = torch.tensor(rows)
        self._copies = torch.tensor([len(places[each]) for each in range(self.num_experts)])
        self.experts = experts

    def _tensors(self, slot: int) -> list[torch.Tensor]:
        """Everything that belongs to the expert of one slot."""
        w13, w2, spec = self._module.port
        weights = [each.panels if isinstance(each, NativeExperts) else each for each in (w13, w2)]
        return [each[slot] for each in (*weights, spec.b13, spec.b2) if each is not None]

    def _bytes(self, slot: int, first: int, end: int) -> torch.Tensor:
        parts, start = [], 0
        for each in self._tensors(slot):
            data = each.contiguous().view(torch.uint8).flatten()
            parts.append(data[max(0, first - start) : max(0, end - start)])
            start += len(data)
        return torch.cat(parts)

    def _put(self, slot: int, data: torch.Tensor) -> None:
        start = 0
        for each in self._tensors(slot):
            own = data[start : start + each.nbytes]
            each.copy_(own.view(each.dtype).view(each.shape))
            start += each.nbytes


def _rank_and_place(move: Move, each: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rank and place of the two slots of a move."""
    return divmod(move.source, each), divmod(move.target, each)


def _chosen(part: Any, index: torch.Tensor) -> Any:
    """Experts of weights, or of what belongs to them, in the order of `index`."""
    if isinstance(part, NativeExperts):
        return replace(part, panels=part.panels[index])
    if isinstance(part, torch.Tensor):
        return part[index]
    b13, b2 = (None if each is None else each[index] for each in (part.b13, part.b2))
    return replace(part, b13=b13, b2=b2)


def slots_of(modules: Iterable[torch.nn.Module]) -> Sequence[ExpertSlots]:
    """Return the slots of all layers, in the order of modules."""
    found = (vars(module).get(SLOTS) for module in modules)
    return [each for each in found if each is not None]
