"""Catalog: which models the mesh serves, by all their names.

Models are read from the workers' latest heartbeats at each call. A model whose last worker has left
is remembered for as long as a scheduler waits for a worker, which is longer while one loads the
model: requests for it wait there.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.mesh.adapter_names import AdapterNames
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import InvalidInput, Unavailable, UnknownModel
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import Heartbeat, ModelCard

WORKER = "worker"
ENCODER = "encoder"
TOKENIZER: Final = "tokenizer"
_POLL_S: Final = 0.05
"""Interval of looking for a model that may appear soon."""
_MAX_REMEMBERED: Final = 1024
"""Models; the least recently announced one is forgotten first."""
_RANGE: Final = 1 << 64


class Catalog:
    """Must receive every heartbeat: `on_beat`."""

    def __init__(
        self,
        members: Members,
        settings: Settings,
        clock: Callable[[], float] = monotonic_s,
        *,
        includes_tokenized: bool = False,
    ) -> None:
        """`includes_tokenized`: models that only a tokenizer knows count as served, too."""
        self._members = members
        self._includes_tokenized = includes_tokenized
        self._clock = clock
        self._started_s = clock()
        self._first_heard_s: float | None = None
        self._startup_s = settings.gateway.service_wait_s
        limits = settings.service
        self._beat_interval_s = (
            limits.beat_interval_s if includes_tokenized else limits.worker_beat_interval_s
        )
        self._memory_s = settings.scheduler.worker_wait_s
        self._adapters = AdapterNames(clock, max(self._memory_s, self._beat_interval_s))
        self._heard: OrderedDict[ModelName, tuple[ModelCard, float]] = OrderedDict()
        self._aliases = settings.gateway.model_aliases
        self._splits = settings.gateway.model_splits
        self._configured = {
            name for model in settings.models for name in (model.name, *model.served_model_name)
        }

    def on_beat(self, beat: Heartbeat) -> None:
        """Remember the models of a heartbeat."""
        cards = beat.models if beat.service == WORKER else []
        if self._includes_tokenized:
            cards = [*beat.tokenizes, *cards]
        if beat.starts or (beat.service != WORKER and not cards):
            return
        if self._first_heard_s is None:
            self._first_heard_s = self._clock()
        for card in cards:
            if beat.service == WORKER:
                self._adapters.note(beat, card)
            self._heard[card.name] = card, self._clock()
            self._heard.move_to_end(card.name)
            if len(self._heard) > _MAX_REMEMBERED:
                self._heard.popitem(last=False)

    def all(self) -> list[ModelCard]:
        """A card for each model that is served now, sorted by name."""
        cards = {card.name: card for card in self._cards()}
        return [cards[name] for name in sorted(cards)]

    def names(self, card: ModelCard) -> list[ModelName]:
        """All names of a model, its canonical name first."""
        names = [card.name, *card.aliases]
        names.extend(ModelName(alias) for alias, name in self._aliases.items() if name in names)
        return list(dict.fromkeys(names))

    def splits(self) -> list[tuple[str, ModelCard]]:
        """Names shared by several models, each with its model of the highest weight."""
        found = ((name, self._first(in_order(self._splits[name], ""))) for name in self._splits)
        return [(name, card) for name, card in found if card is not None]

    async def find_soon(self, name: str | None, request_id: str = "") -> ModelCard:
        """`find`, but a gateway that has just started waits for the first heartbeats."""
        while True:
            try:
                return self.find(name, request_id)
            except (UnknownModel, Unavailable):
                if not self._is_new():
                    raise
            await asyncio.sleep(_POLL_S)

    def _is_new(self) -> bool:
        """Return whether there may be workers whose first heartbeat has not arrived yet."""
        if self._first_heard_s is None:
            return self._clock() - self._started_s < self._startup_s
        return self._clock() - self._first_heard_s < self._beat_interval_s

    def find(self, name: str | None, request_id: str = "") -> ModelCard:
        """The model of a name. None: the only model of the mesh.

        `request_id` chooses among models that share the name. Models that are served now have
        precedence over those served recently. Raises UnknownModel, or Unavailable for a configured
        model that is not up.
        """
        if name is None:
            return self._only()
        wanted = self._aliases.get(name, name)
        split = self._splits.get(wanted, {})
        names = list(in_order(split, request_id)) if split else [wanted]
        found = self._first(names) or self._first(names, self._remembered())
        found = found or self._with_adapter(wanted)
        if found is not None:
            return found
        if split or wanted in self._configured or wanted in self._starting():
            raise Unavailable(f"no worker serves the model {name!r} yet", retry_after_s=1.0)
        raise UnknownModel(f"The model `{name}` does not exist.", param="model")

    def adapters(self, card: ModelCard) -> list[AdapterCard]:
        """Adapters of a model that a worker serves now, by name."""
        return list(self._adapters.of(card.name))

    def resolvers(self) -> list[ModelCard]:
        """Models whose workers look for unknown adapters in a directory, by name."""
        return [card for card in self.all() if card.resolves_adapters]

    def _with_adapter(self, name: str) -> ModelCard | None:
        """The card of the model that an adapter changes, with that adapter."""
        found = self._adapters.find(name)
        if found is None:
            return None
        model, adapter = found
        card = self._first([model]) or self._first([model], self._remembered())
        if card is None:
            return None
        return msgspec.structs.replace(card, adapter=adapter, adapters=[])

    def _first(
        self, wanted: Iterable[str], cards: Iterable[ModelCard] | None = None
    ) -> ModelCard | None:
        """The model of the first name that is served. `cards` default to those of now."""
        cards = self._cards() if cards is None else cards
        by_name = {name: card for card in cards for name in (card.name, *card.aliases)}
        names = (self._aliases.get(name, name) for name in wanted)
        return next((by_name[ModelName(name)] for name in names if name in by_name), None)

    def _only(self) -> ModelCard:
        cards = self.all() or self._remembered()
        if len(cards) == 1:
            return cards[0]
        if not cards:
            raise Unavailable("no worker is up yet", retry_after_s=1.0)
        names = ", ".join(card.name for card in cards)
        raise InvalidInput(f"model is missing; there are: {names}", param="model")

    def has_tokenizer(self, model: ModelName) -> bool:
        """Return whether a live tokenizer knows the model."""
        return any(card.name == model for card in self._tokenized())

    def _tokenized(self) -> Iterable[ModelCard]:
        for member in self._members.service(TOKENIZER):
            yield from member.beat.tokenizes

    def _cards(self) -> Iterable[ModelCard]:
        """Several cards of a model are possible: the last one counts.

        A worker's card replaces a tokenizer's, and the shortest context comes last, because every
        worker accepts what fits into it.
        """
        if self._includes_tokenized:
            yield from self._tokenized()
        cards = [card for each in self._members.service(WORKER) for card in each.beat.models]
        yield from sorted(cards, key=attrgetter("max_model_len"), reverse=True)

    def _remembered(self) -> list[ModelCard]:
        """Cards of models that had a worker recently, or have one that starts again."""
        oldest_s, starting = self._clock() - self._memory_s, self._starting()
        return [
            card
            for card, heard_s in self._heard.values()
            if heard_s > oldest_s or card.name in starting
        ]

    def _starting(self) -> set[ModelName]:
        """Models that a worker is loading."""
        return {name for each in self._members.starting(WORKER) for name in each.beat.starts}


def in_order(weights: Mapping[str, float], request_id: str) -> list[str]:
    """The models that share a name: the request's own first, then the ones to use without it.

    The same id always gets the same order. When a model is added or removed only its share of the
    requests moves (weighted rendezvous hashing). Without an id the highest weight comes first.
    """
    if not request_id:
        return sorted(weights, key=lambda model: (-weights[model], model))
    return sorted(weights, key=lambda model: (_distance(model, request_id) / weights[model], model))


def _distance(model: str, request_id: str) -> float:
    """Exponentially distributed: the smallest one, each divided by its weight, is a fair choice."""
    digest = hashlib.sha256(f"{model}\0{request_id}".encode()).digest()
    return -math.log((int.from_bytes(digest[:8], "big") + 1) / (_RANGE + 1))
