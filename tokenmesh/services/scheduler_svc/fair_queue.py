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

    def turns(self, claim: Claim) -> int:
        """How many more it needs for a claim; 0: it is in a turn that will do."""
        missing = claim.cost - self.deficit
        if self.has_turn and missing <= 0:
            return 0
        return max(1, math.ceil(missing / self.gain))

    def earn(self, turns: int, claim: Claim) -> None:
        """Never more than its next claim and one turn: who is passed over must not hoard."""
        self.deficit = min(self.deficit + turns * self.gain, claim.cost + self.gain)


class _Ring:
    """One class."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        """In the order of their next turns; at the front who is in one."""

    def __len__(self) -> int:
        return sum(len(lane.claims) for lane in self._lanes.values())

    def add(self, claim: Claim, quantum: int) -> None:
        lane = self._lanes.setdefault(claim.tenant, _Lane(0.0))
        lane.gain = quantum * claim.weight
        bisect.insort(lane.claims, claim, key=attrgetter("order"))

    def next(self, passed: Collection[Claim], full: Collection[str]) -> Claim | None:
        found, fewest = None, math.inf
        for tenant, lane in self._lanes.items():
            first = None if tenant in full else lane.first(passed)
            if first is not None and (turns := lane.turns(first)) < fewest:
                found, fewest = first, turns
        return found

    def take(self, claim: Claim) -> None:
        lane = self._lanes[claim.tenant]
        self._go_round(lane, claim)
        lane.deficit -= claim.cost
        self.remove(claim)
        if lane.claims and lane.deficit < lane.claims[0].cost:
            lane.has_turn = False
            self._lanes.move_to_end(claim.tenant)

    def _go_round(self, until: _Lane, claim: Claim) -> None:
        """As many turns for all as it takes until this lane can pay for the claim in its own."""
        turns = until.turns(claim)
        if not turns:
            return
        for lane in self._lanes.values():
            lane.earn(turns, claim if lane is until else lane.claims[0])
            if lane is until:
                turns -= 1  # those behind it have yet to come in this round
        while (front := next(iter(self._lanes.values()))) is not until:
            front.has_turn = False
            self._lanes.move_to_end(front.claims[0].tenant)
        until.has_turn = True

    def remove(self, claim: Claim) -> None:
        lane = self._lanes.get(claim.tenant)
        if lane is not None and lane.remove(claim) and not lane.claims:
            del self._lanes[claim.tenant]

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
        """Whose turn it is. Changes nothing: only who is served has had a turn.

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
        self._rings[claim.group].take(claim)
        self._tidy(claim.group)

    def remove(self, claim: Claim) -> None:
        """It gives up; nothing happens when it is not there any more."""
        ring = self._rings.get(claim.group)
        if ring is not None:
            ring.remove(claim)
            self._tidy(claim.group)

    def ahead(self, claim: Claim) -> int:
        """About how many are served before this one, which is there."""
        before = (ring for group, ring in self._rings.items() if group < claim.group)
        sooner = sum(len(ring) for ring in before)
        return sooner + self._rings[claim.group].ahead(claim)

    def _tidy(self, group: int) -> None:
        if not len(self._rings[group]):
            del self._rings[group]
