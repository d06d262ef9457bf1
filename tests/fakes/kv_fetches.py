"""Fetches: requests that wait for images of other workers, and images that are lent to these.

Loads end late, in any order, and some with wrong images; lent slots are read until they are given
back.
"""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.fakes.kv_runner import Cells, cell_after, first_cell, in_group, media_mark
from tokenmesh.engine.kv.host_tier import HostTier
from tokenmesh.engine.request.request import Request

if TYPE_CHECKING:
    from tests.fakes.engine_schedules import Schedule


def right_cells(schedule: "Schedule", request: Request, number: int) -> Cells:
    """Return what the image of the request's key with this number holds."""
    size = schedule.settings.block_size
    index, group = divmod(number, schedule.groups.num_windowed + 1)
    cells: Cells = []
    for at in range((index + 1) * size):
        before = cells[-1] if cells else first_cell(None, 0)
        mark = media_mark(request.spec.media, at)
        cells.append(cell_after(before, request.token_ids[at], mark))
    block = cells[index * size :]
    return [in_group(cell, group - 1) for cell in block] if group else block


@dataclass
class Waiting:
    """A request that is not in the engine yet."""

    request: Request
    keys: list[bytes]
    are_good: list[bool]


class Fetches:
    """Fetches of one schedule with a host tier."""

    def __init__(self, dice: Random, schedule: "Schedule") -> None:
        self._dice = dice
        self._schedule = schedule
        self.waiting: list[Waiting] = []
        self.has_news = False
        """True where a request has entered the engine, which may have ended it at once."""
        self._lent: list[tuple[list[bytes], dict[tuple[int, int], int]]] = []
        """Keys, and what their slots held when they were lent."""

    def has(self, request: Request) -> bool:
        """Return whether it waits for a load."""
        return any(each.request is request for each in self.waiting)

    def take(self, request: Request) -> bool:
        """Return whether the request waits for a load, and enters the engine when that is over."""
        # the cells of the others depend on more than their tokens
        is_alone = self._schedule.engine._cache.host is None or self._dice.random() < 0.5
        if request.spec.rope_boundary is not None or is_alone:
            return False
        wanted = self._schedule.engine.exchange.expect(request)
        keys, goods = [], []
        for place, (key, slot) in enumerate(zip(wanted.keys, wanted.slots, strict=True)):
            if slot is None:
                continue
            is_good = self._dice.random() < 0.7
            cells = right_cells(self._schedule, request, wanted.first + place)
            for at, cell in enumerate(cells):
                self._schedule.runner.arena[slot, at] = cell if is_good else 12345
            keys.append(key)
            goods.append(is_good)
        self.waiting.append(Waiting(request, keys, goods))
        return True

    def go_on(self) -> None:
        """End some loads, lend some images, and give some back."""
        self.has_news = False
        dice, exchange = self._dice, self._schedule.engine.exchange
        for each in [each for each in self.waiting if dice.random() < 0.3]:
            self.waiting.remove(each)
            exchange.arrived(each.request, each.keys, each.are_good)
            if dice.random() < 0.1:
                exchange.let_go(each.request)
            self._schedule.engine.add(each.request)
            self.has_news = True
        for lent in [each for each in self._lent if dice.random() < 0.2]:
            self._give_back(lent)
        requests = [case.request for case in self._schedule._added]
        has_host = self._schedule.engine._cache.host is not None
        if has_host and requests and dice.random() < 0.3:
            hashes = dice.choice(requests).kv.hashes
            keys = list(hashes[dice.randrange(4) :])
            slots = exchange.lend(keys)
            self._lent.append((keys[: len(slots)], self._held(slots)))

    def end(self) -> None:
        """Give everything back."""
        assert not self.waiting
        for lent in list(self._lent):
            self._give_back(lent)

    def _held(self, slots: list[int]) -> dict[tuple[int, int], int]:
        arena = self._schedule.runner.arena
        return {place: cell for place, cell in arena.items() if place[0] in slots}

    def _give_back(self, lent: tuple[list[bytes], dict[tuple[int, int], int]]) -> None:
        keys, held = lent
        exchange = self._schedule.engine.exchange
        slots = exchange.slots_of(keys)
        assert len(slots) == len(keys), "a lent image is gone"
        assert self._held(slots) == held, "a lent image has changed"
        exchange.take_back(keys)
        self._lent.remove(lent)


class Loads:
    """Writes slots of the host tier whenever the dice say, as a transfer from elsewhere would."""

    def __init__(self, dice: Random, schedule: "Schedule") -> None:
        self._dice = dice
        self._schedule = schedule
        self._open: list[tuple[bytes, bool]] = []
        """Keys of running loads, and whether they end well."""

    def go_on(self) -> None:
        """End some loads, begin one."""
        tier, dice = self._schedule.engine._cache.host, self._dice
        if tier is None:
            return
        assert sum(tier.states.values()) == tier.num_slots, "a slot is lost"
        for load in [each for each in self._open if dice.random() < 0.4]:
            self._open.remove(load)
            tier.finish([load[0]], [load[1]])
        requests = [case.request for case in self._schedule._added]
        # the cells of the others depend on more than their tokens
        requests = [each for each in requests if each.spec.rope_boundary is None]
        if dice.random() < 0.3 and requests:
            self._begin(tier, dice.choice(requests))

    def end(self) -> None:
        """End all; then every slot is free or ready."""
        tier = self._schedule.engine._cache.host
        if tier is not None:
            keys = [key for key, _ in self._open]
            tier.finish(keys, [False] * len(keys))
            states = tier.states
            assert states["free"] + states["ready"] == tier.num_slots, "a slot is lost"
            assert not tier._holds
            assert len(tier._evictable) == states["ready"]

    def _begin(self, tier: HostTier, request: Request) -> None:
        groups = range(self._schedule.groups.num_windowed + 1)
        index, group = self._dice.randrange(8), self._dice.choice(groups)
        if index >= len(request.kv.hashes):
            return
        key = request.kv.hashes[index] + (bytes([group]) if group else b"")
        for slot in tier.reserve([key]):
            if slot is None:
                tier.unpin([key])
                continue
            is_good = self._dice.random() < 0.7
            number = index * (self._schedule.groups.num_windowed + 1) + group
            for at, cell in enumerate(right_cells(self._schedule, request, number)):
                self._schedule.runner.arena[slot, at] = cell if is_good else 12345
            self._open.append((key, is_good))
