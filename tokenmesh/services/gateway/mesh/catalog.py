"""Catalog: which models the mesh serves, by all their names.

Those served now are read from the workers' beats each time. One whose last worker has just gone is
remembered for as long as a scheduler would wait for a worker: who asks for it waits there.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from tokenmesh.services.gateway.mesh.split import in_order
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import InvalidInput, Unavailable, UnknownModel
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages.beat import Heartbeat, ModelCard

WORKER = "worker"
ENCODER = "encoder"
TOKENIZER: Final = "tokenizer"
_LOOK_S: Final = 0.05
"""Between two looks whether a model has been heard of."""
_MAX_REMEMBERED: Final = 1024
"""Models, those not heard of for longest are forgotten first."""


class Catalog:
    """Give it every beat: `on_beat`."""

    def __init__(
        self,
        members: Members,
        settings: Settings,
        clock: Callable[[], float] = monotonic_s,
        *,
        includes_tokenized: bool = False,
    ) -> None:
        """`includes_tokenized`: models that a tokenizer knows count as served, too."""
        self._members = members
        self._includes_tokenized = includes_tokenized
        self._clock = clock
        self._started_s = clock()
        self._first_heard_s: float | None = None
        self._patience_s = settings.gateway.service_wait_s
        limits = settings.service
        self._beat_interval_s = (
            limits.beat_interval_s if includes_tokenized else limits.worker_beat_interval_s
        )
        self._memory_s = settings.scheduler.worker_wait_s
        self._heard: OrderedDict[ModelName, tuple[ModelCard, float]] = OrderedDict()
        self._aliases = settings.gateway.model_aliases
        self._splits = settings.gateway.model_splits
        self._configured = {
            name for model in settings.models for name in (model.name, *model.served_model_name)
        }

    def on_beat(self, beat: Heartbeat) -> None:
        """Remember what a process serves."""
        cards = beat.models if beat.service == WORKER else []
        if self._includes_tokenized:
            cards = [*beat.tokenizes, *cards]
        if beat.service != WORKER and not cards:
            return
        if self._first_heard_s is None:
            self._first_heard_s = self._clock()
        for card in cards:
            self._heard[card.name] = card, self._clock()
            self._heard.move_to_end(card.name)
            if len(self._heard) > _MAX_REMEMBERED:
                self._heard.popitem(last=False)

    def all(self) -> list[ModelCard]:
        """One card a model that is served now, in order of their names."""
        cards = {card.name: card for card in self._cards()}
        return [cards[name] for name in sorted(cards)]

    def names(self, card: ModelCard) -> list[ModelName]:
        """Everything that a client may call the model, its canonical name first."""
        names = [card.name, *card.aliases]
        names.extend(ModelName(alias) for alias, name in self._aliases.items() if name in names)
        return list(dict.fromkeys(names))

    def splits(self) -> list[tuple[str, ModelCard]]:
        """Names that stand for several models, each with the heaviest that is served."""
        found = ((name, self._first(in_order(self._splits[name], ""))) for name in self._splits)
        return [(name, card) for name, card in found if card is not None]

    async def find_soon(self, name: str | None, request_id: str = "") -> ModelCard:
        """`find`, but a gateway that has just started hears first who is there."""
        while True:
            try:
                return self.find(name, request_id)
            except (UnknownModel, Unavailable):
                if not self._is_new():
                    raise
            await asyncio.sleep(_LOOK_S)

    def _is_new(self) -> bool:
        """Whether there may be workers that had no time to tell of themselves yet."""
        if self._first_heard_s is None:
            return self._clock() - self._started_s < self._patience_s
        return self._clock() - self._first_heard_s < self._beat_interval_s

    def find(self, name: str | None, request_id: str = "") -> ModelCard:
        """The model that a client means. None: the only one there is.

        `request_id` decides where the name stands for several; what is served now comes before what
        was served lately. Raises UnknownModel, or Unavailable for a model that is configured and
        not up.
        """
        if name is None:
            return self._only()
        wanted = self._aliases.get(name, name)
        split = self._splits.get(wanted, {})
        names = list(in_order(split, request_id)) if split else [wanted]
        found = self._first(names) or self._first(names, self._remembered())
        if found is not None:
            return found
        if split or wanted in self._configured:
            raise Unavailable(f"no worker serves the model {name!r} yet", retry_after_s=1.0)
        raise UnknownModel(f"The model `{name}` does not exist.", param="model")

    def _first(
        self, wanted: Iterable[str], cards: Iterable[ModelCard] | None = None
    ) -> ModelCard | None:
        """Of the first name that is served; `cards` other than those of now."""
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
        """Whether a live tokenizer says that it knows the model."""
        return any(card.name == model for card in self._tokenized())

    def _tokenized(self) -> Iterable[ModelCard]:
        for member in self._members.service(TOKENIZER):
            yield from member.beat.tokenizes

    def _cards(self) -> Iterable[ModelCard]:
        """Of one model the last one counts: a worker knows better what it serves, and what the
        worker with the shortest context takes, all of them take."""
        if self._includes_tokenized:
            yield from self._tokenized()
        cards = [card for each in self._members.service(WORKER) for card in each.beat.models]
        yield from sorted(cards, key=attrgetter("max_model_len"), reverse=True)

    def _remembered(self) -> list[ModelCard]:
        """Of models that had a worker lately."""
        oldest_s = self._clock() - self._memory_s
        return [card for card, heard_s in self._heard.values() if heard_s > oldest_s]
