"""AdapterNames: which adapters the workers have, by name."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import Heartbeat, ModelCard

_MAX_WORKERS: Final = 4096


@dataclass(slots=True)
class _Held:
    """It holds what one worker has said last."""

    model: ModelName
    cards: list[AdapterCard]
    heard_s: float


@dataclass(slots=True)
class _Named:
    """The workers that serve adapters of one name."""

    by_worker: dict[InstanceId, tuple[ModelName, AdapterCard]] = field(default_factory=dict)


class AdapterNames:
    """Names of a worker without heartbeats are kept for `memory_s`: requests wait for it."""

    def __init__(self, clock: Callable[[], float], memory_s: float) -> None:
        self._clock = clock
        self._memory_s = memory_s
        self._workers: OrderedDict[InstanceId, _Held] = OrderedDict()
        self._by_name: dict[str, _Named] = {}

    def note(self, beat: Heartbeat, card: ModelCard) -> None:
        """One model of a worker's heartbeat."""
        worker, held = beat.instance_id, self._workers.get(beat.instance_id)
        if held is None and not card.adapters:
            return
        if held is None:
            held = self._workers[worker] = _Held(card.name, [], 0.0)
        held.heard_s = self._clock()
        self._workers.move_to_end(worker)
        if held.cards != card.adapters or held.model != card.name:
            self._forget_names(worker, held.cards)
            held.cards, held.model = card.adapters, card.name
            for each in card.adapters:
                named = self._by_name.setdefault(each.name, _Named())
                named.by_worker[worker] = card.name, each
        self._expire()

    def find(self, name: str) -> tuple[ModelName, AdapterCard] | None:
        """The model and the latest adapter of a name."""
        self._expire()
        named = self._by_name.get(name)
        if named is None:
            return None
        return max(named.by_worker.values(), key=lambda each: each[1].created_s)

    def of(self, model: ModelName) -> Iterator[AdapterCard]:
        """Adapters of a model, by name."""
        self._expire()
        for name in sorted(self._by_name):
            own = [card for of, card in self._by_name[name].by_worker.values() if of == model]
            if own:
                yield max(own, key=attrgetter("created_s"))

    def _expire(self) -> None:
        oldest_s = self._clock() - self._memory_s
        while self._workers:
            worker, held = next(iter(self._workers.items()))
            if held.heard_s >= oldest_s and len(self._workers) <= _MAX_WORKERS:
                return
            del self._workers[worker]
            self._forget_names(worker, held.cards)

    def _forget_names(self, worker: InstanceId, cards: list[AdapterCard]) -> None:
        for each in cards:
            named = self._by_name.get(each.name)
            if named is not None:
                named.by_worker.pop(worker, None)
                if not named.by_worker:
                    del self._by_name[each.name]
