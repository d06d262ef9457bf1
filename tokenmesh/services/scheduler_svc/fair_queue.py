"""The order of waiting requests: classes, in a class deficit round robin over tenants, in tokens.

A tenant's turn gives it `quantum * weight` tokens to spend, what it does not spend is kept for its
next turn while it waits, and nothing is kept for those who do not wait. So whoever floods the line
waits behind itself. No I/O, no clock.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides about a request's turn."""

    group: int
    """Its class; every claim of a smaller one comes before it."""
    tenant: str
    weight: float
    order: tuple[int, int]
    """Its place among its tenant's own; no two claims of a queue have the same."""
    cost: int
    """Tokens it will take, as far as one can tell."""


@dataclass(slots=True)
class _Lane:
    """The claims of one tenant in one class."""

    gain: float
    """Tokens of one turn."""
    claims: list[Claim] = field(default_factory=list)
    deficit: float = 0.0
    has_turn: bool = False

    def first(self, passed: Collection[Claim]) -> Claim | None:
        return next((claim for claim in self.claims if claim not in passed), None)

    def index(self, claim: Claim) -> int:
        return bisect.bisect_left(self.claims, claim.order, key=attrgetter("order"))

    def remove(self, claim: Claim) -> bool:
        index = self.index(claim)
        is_there = self.claims[index : index + 1] == [claim]
        if is_there:
            del self.claims[index]
        return is_there

    def earn(self, turns: int, cost: int) -> None:
        """Never more than the next claim and one turn: who is passed over must not hoard."""
        self.deficit = min(self.deficit + turns * self.gain, cost + self.gain)


class _Ring:
    """One class."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(lane.claims) for lane in self._lanes.values())

    def add(self, claim: Claim, quantum: int) -> None:
        lane = self._lanes.setdefault(claim.tenant, _Lane(0.0))
        lane.gain = quantum * claim.weight
        bisect.insort(lane.claims, claim, key=attrgetter("order"))

    def next(self, passed: Collection[Claim], full: Collection[str]) -> Claim | None:
        heads = {
            tenant: first
            for tenant, lane in self._lanes.items()
            if tenant not in full and (first := lane.first(passed)) is not None
        }
        if not heads:
            return None
        self._skip_idle_rounds(heads)
        while True:
            tenant, lane = next(iter(self._lanes.items()))
            first = heads.get(tenant)
            if first is not None:
                if not lane.has_turn:
                    lane.has_turn = True
                    lane.earn(1, first.cost)
                if lane.deficit >= first.cost:
                    return first
            lane.has_turn = False
            self._lanes.move_to_end(tenant)

    def _skip_idle_rounds(self, heads: dict[str, Claim]) -> None:
        """As many rounds at once as nobody could be served in."""
        turns = min(
            math.ceil((first.cost - self._lanes[tenant].deficit) / self._lanes[tenant].gain)
            for tenant, first in heads.items()
        )
        if turns > 1:
            for tenant, first in heads.items():
                self._lanes[tenant].earn(turns - 1, first.cost)

    def remove(self, claim: Claim) -> _Lane | None:
        """The lane that it was in; None: it was not there."""
        lane = self._lanes.get(claim.tenant)
        if lane is None or not lane.remove(claim):
            return None
        if not lane.claims:
            del self._lanes[claim.tenant]
        return lane

    def ahead(self, claim: Claim) -> int:
        """About how many come first, if all lanes weigh the same."""
        lane = self._lanes[claim.tenant]
        index = lane.index(claim)
        others = (each for each in self._lanes.values() if each is not lane)
        return index + sum(min(len(each.claims), index) for each in others)


class FairQueue:
    """Claims until they are taken or removed."""

    def __init__(self, quantum: int) -> None:
        """`quantum`: tokens of one turn at weight 1."""
        self._quantum = quantum
        self._rings: dict[int, _Ring] = {}

    def add(self, claim: Claim) -> None:
        """Join."""
        self._rings.setdefault(claim.group, _Ring()).add(claim, self._quantum)

    def next(self, passed: Collection[Claim] = (), full: Collection[str] = ()) -> Claim | None:
        """Whose turn it is; the same until something is added, taken or removed.

        `passed` are left out, and all of the tenants `full`: they cannot be served now, and must
        not hold up others.
        """
        for group in sorted(self._rings):
            found = self._rings[group].next(passed, full)
            if found is not None:
                return found
        return None

    def take(self, claim: Claim) -> None:
        """It is served, at its tenant's expense."""
        lane = self._remove(claim)
        if lane is not None:
            lane.deficit -= claim.cost

    def remove(self, claim: Claim) -> None:
        """It gives up; nothing happens when it is not there any more."""
        self._remove(claim)

    def ahead(self, claim: Claim) -> int:
        """About how many are served before this one, which is there."""
        before = (ring for group, ring in self._rings.items() if group < claim.group)
        sooner = sum(len(ring) for ring in before)
        return sooner + self._rings[claim.group].ahead(claim)

    def _remove(self, claim: Claim) -> _Lane | None:
        ring = self._rings.get(claim.group)
        lane = ring.remove(claim) if ring is not None else None
        if ring is not None and not len(ring):
            del self._rings[claim.group]
        return lane
