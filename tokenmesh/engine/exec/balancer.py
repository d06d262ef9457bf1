"""Balancer: decides on the leader which experts move between ranks, a part before each step."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from tokenmesh.engine.models.tree.expert_slots import ExpertSlots
from tokenmesh.engine.ranks.frames import MoveExpert
from tokenmesh.engine.ranks.placement import Move, imbalance, kept_in_place, moves, placed
from tokenmesh.shared.config.eplb import EplbConfig

MOST_BYTES: Final = 1 << 19
"""So much of an expert is moved before one step: some 1 ms between processes of a host."""
_ENOUGH: Final = 1.05
"""A layer whose most loaded rank has so many means is left as it is."""

logger = logging.getLogger(__name__)


class Balancer:
    """Used by the thread that launches steps."""

    def __init__(
        self,
        config: EplbConfig,
        ranks: int,
        nodes: int,
        groups: int,
        layers: Callable[[], Sequence[ExpertSlots]],
    ) -> None:
        """nodes: hosts of the ranks; groups: of experts, see `placed`; layers: of the model that is
        loaded now, the same objects as long as it is."""
        self._config, self._ranks = config, ranks
        self._nodes, self._groups = nodes, groups
        self._layers = layers
        self._now: list[list[int]] = []
        """The expert of each slot of each layer, once all moves are carried out."""
        self._seen: Sequence[ExpertSlots] | None = None
        self._step = 0
        self._due: deque[int] = deque()
        """Layers that are looked at before the next steps."""
        self._moves: deque[tuple[int, Move]] = deque()
        self._sent = 0
        """Bytes of the first move."""

    def next_part(self) -> MoveExpert | None:
        """Return what is moved before the step that is launched now; call it before each."""
        layers = self._layers()
        if layers is not self._seen:
            self._begin(layers)
        self._step += 1
        interval, window = self._config.step_interval, self._config.window_size
        phase = self._step % interval
        # The plan of a layer sets its counts to 0: a window as long as the interval begins there.
        if window < interval and phase == interval - window:
            for each in layers:
                each.counts.zero_()
        if not (phase or self._moves or self._due):
            self._due.extend(range(len(layers)))
        if self._due:
            self._plan(self._due.popleft())
        return self._part() if self._moves else None

    def _begin(self, layers: Sequence[ExpertSlots]) -> None:
        """A model was loaded, whose experts are where they began."""
        self._seen, self._now = layers, [list(each.experts) for each in layers]
        self._due.clear()
        self._moves.clear()
        self._sent = 0
        for each in layers:
            each.counts.zero_()

    def _plan(self, layer: int) -> None:
        assert self._seen is not None
        slots, now = self._seen[layer], self._now[layer]
        loads = slots.counts.numpy().astype(np.float64)
        slots.counts.zero_()
        before = imbalance(loads, now, self._ranks)
        if before <= _ENOUGH:
            return
        sizes = len(now), self._groups, self._nodes, self._ranks
        wanted = placed(loads[None], *sizes)[0].tolist()
        wanted = kept_in_place(now, wanted, self._ranks)
        after = imbalance(loads, wanted, self._ranks)
        found = list(moves(now, wanted))
        what = "experts of layer %d: the most loaded rank has %.2f of the mean, with %d moves %.2f"
        logger.info(what, layer, before, len(found), after)
        if after < before:
            self._moves.extend((layer, each) for each in found)
            self._now[layer] = wanted

    def _part(self) -> MoveExpert:
        assert self._seen is not None
        layer, move = self._moves[0]
        first, size = self._sent, self._seen[layer].num_bytes
        self._sent = end = min(size, first + MOST_BYTES)
        if end == size:
            self._moves.popleft()
            self._sent = 0
        return MoveExpert(layer, *move, first, end)
