"""Sharing of rows, blocks and prefill tokens between tenants, by weight.

A tenant below its share takes from the one furthest above its own, the latest request first; the
tokens of that one are computed again, so its stream continues with the same tokens. A tenant that
had much less lately may take more than its share for a moment. A share binds only while another
tenant wants more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.kv.block_tables import held_by
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import TenantShare

Amount = Callable[[Request], int]
"""It holds what a running request holds of something that is scarce."""
IsLighter = Callable[[TenantShare, TenantShare], bool]
"""It tells whether the first has had much less than the second lately."""


@dataclass(slots=True)
class _Holding:
    last: Request
    """It is the running request of the tenant that is served last."""
    total: int = 0


def one_row(_request: Request) -> int:
    """Rows that a running request holds."""
    return 1


def num_blocks(request: Request) -> int:
    """Blocks that it holds, those included that others share."""
    return sum(len(blocks) for blocks in held_by(request))


def giving_way(
    running: Iterable[Request], claimant: Request, need: int, amount: Amount, is_lighter: IsLighter
) -> Request | None:
    """The request to preempt for `claimant`, which needs that much; None: there is none.

    Its tenant is of no smaller class, and would still hold no less than the claimant's tenant by
    weight, or at least something where the claimant has had much less lately. It never is a
    tenant that has had much less itself.
    """
    holdings = _holdings(running, amount)
    mine = holdings.pop(claimant.spec.owner.tenant, None)
    target = ((mine.total if mine else 0) + need) / claimant.spec.owner.weight
    found, most = None, 0.0
    for each in holdings.values():
        owner = each.last.spec.owner
        left = (each.total - amount(each.last)) / owner.weight
        if owner.group < claimant.spec.owner.group or is_lighter(owner, claimant.spec.owner):
            continue
        if left > most and (left >= target or is_lighter(claimant.spec.owner, owner)):
            found, most = each.last, left
    return found


def heaviest(running: Iterable[Request]) -> Request:
    """The request to preempt when the running ones need more blocks than there are."""
    holdings = _holdings(running, num_blocks).values()
    return max(
        holdings, key=lambda each: (each.last.spec.owner.group, each.total / _weight(each))
    ).last


def split(total: int, demands: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    """Tokens of a step by tenant, from their demands and weights; at least one each.

    No tenant gets more than its demand; a demand below its share is met in full; nothing is left
    while a demand is not met, but for what rounding down leaves.
    """
    shares: dict[str, int] = {}
    weight = sum(weight for _, weight in demands.values())
    for tenant, (demand, own) in sorted(demands.items(), key=lambda item: item[1][0] / item[1][1]):
        share = total * min(1.0, own / weight) if weight > 0 else total
        shares[tenant] = max(1, min(demand, int(share)))
        total = max(0, total - shares[tenant])
        weight -= own
    return shares


def _weight(holding: _Holding) -> float:
    return holding.last.spec.owner.weight


def _holdings(running: Iterable[Request], amount: Amount) -> dict[str, _Holding]:
    """By tenant; `running` is in service order."""
    found: dict[str, _Holding] = {}
    for request in running:
        holding = found.get(request.spec.owner.tenant)
        if holding is None:
            holding = found[request.spec.owner.tenant] = _Holding(request)
        holding.last = request
        holding.total += amount(request)
    return found


_UNBOUND: Final[dict[str, int]] = {}


class Sharing:
    """It shares the resources of one scheduler. A tenant that is alone is not looked at."""

    def __init__(self, live: LiveRequests, cache: PrefixCache) -> None:
        self._live = live
        self._running = live.running
        self._waiting = live.waiting
        self._rows = live.rows
        self._pool = cache.pool
        self._groups = cache.groups
        self._recent = live.recent
        self._shares = _UNBOUND
        """Prefill tokens that each tenant has left in this step; empty: they do not compete."""

    def begin_step(self, budget: int) -> bool:
        """Give each tenant its share; whether running requests are short of blocks."""
        self._shares, is_short = _UNBOUND, False
        holders = self._rows.by_tenant
        if len(holders) < 2 and not len(self._waiting):
            return False
        if len(holders.keys() | self._waiting.tenants) < 2:
            return False
        while self._must_relieve():
            self._live.preempt(heaviest(self._running))
            is_short = True
        if len(self._waiting) and not is_short:
            self._make_way(self._waiting.first)
        self._shares = self._split(budget, admits=not is_short)
        return is_short

    def allowed(self, request: Request, num_tokens: int) -> int:
        """Return how many of the prefill tokens that a request could have its tenant has a right
        to.
        """
        return min(num_tokens, self._shares.get(request.spec.owner.tenant, num_tokens))

    def take(self, request: Request, num_tokens: int) -> int:
        """Return what `allowed` returns, and take it from what the tenant has left."""
        num_tokens = self.allowed(request, num_tokens)
        if request.spec.owner.tenant in self._shares:
            self._shares[request.spec.owner.tenant] -= num_tokens
        return num_tokens

    def _must_relieve(self) -> bool:
        """Return whether running requests of several tenants need more blocks than there are."""
        num_free = self._pool.num_free
        if len(self._rows.by_tenant) < 2 or num_free >= len(self._running) * self._groups.growth:
            return False
        num_growing = sum(_grows(request) for request in self._running)
        return num_growing * self._groups.growth > num_free

    def _make_way(self, claimant: Request) -> None:
        """A row and blocks for whose turn it is, from tenants above their share: one a step."""
        if not self._rows.has_free and not self._take_from_others(claimant, 1, one_row):
            return
        need = self._groups.needed(claimant.num_known)
        while self._live.find(claimant) is None and self._take_from_others(
            claimant, need, num_blocks
        ):
            pass

    def _take_from_others(self, claimant: Request, need: int, amount: Amount) -> bool:
        found = giving_way(self._running, claimant, need, amount, self._recent.is_lighter)
        if found is not None:
            self._live.preempt(found)
        return found is not None

    def _split(self, budget: int, *, admits: bool) -> dict[str, int]:
        """Steps in which a tenant prefills that has had much less than another are not shared with
        that other: they are few, and short ones bring the first token sooner."""
        prefilling = self._live.in_lane(self._live.prefilling)
        left = max(0, budget - self._live.num_running_in_lane + len(prefilling))
        # one that cannot begin in this step must not keep others from what they could compute
        if (
            admits
            and len(self._waiting)
            and self._rows.has_free
            and self._live.find(self._waiting.first) is not None
        ):
            prefilling.append(self._waiting.first)
        demands: dict[TenantShare, int] = {}
        for request in prefilling:
            demands[request.spec.owner] = demands.get(request.spec.owner, 0) + request.backlog
        if len({owner.tenant for owner in demands}) < 2:
            return _UNBOUND
        light = [each for each in demands if self._recent.is_light(each)]
        sharing = {each.tenant: (demands[each], each.weight) for each in light or demands}
        return {**{each.tenant: 0 for each in demands}, **split(left, sharing)}


def _grows(request: Request) -> bool:
    """Return whether the next token of a decoding request needs a block."""
    end = request.num_computed + 1
    return not request.decode.is_prefilling and request.kv.capacity < end < request.decode_end
