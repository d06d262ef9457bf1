"""Sharing: moves rows and blocks between tenants before a step, and splits its prefill."""

from collections.abc import Callable
from typing import Final

from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.block_tables import Hits
from tokenmesh.services.worker_svc.engine.fair_share import (
    Amount,
    giving_way,
    heaviest,
    num_blocks,
    one_row,
    split,
)
from tokenmesh.services.worker_svc.engine.kv_groups import KvGroups
from tokenmesh.services.worker_svc.engine.owner import Owner
from tokenmesh.services.worker_svc.engine.queues import ServiceQueue
from tokenmesh.services.worker_svc.engine.recent_use import RecentUse
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.services.worker_svc.engine.row_table import RowTable
from tokenmesh.services.worker_svc.engine.waiting_line import WaitingLine

_UNBOUND: Final[dict[str, int]] = {}


class Sharing:
    """Of one scheduler. A tenant that is alone is not looked at."""

    def __init__(
        self,
        running: ServiceQueue,
        prefilling: ServiceQueue,
        waiting: WaitingLine,
        rows: RowTable,
        pool: BlockPool,
        groups: KvGroups,
        preempt: Callable[[Request], None],
        find: Callable[[Request], Hits | None],
        recent: RecentUse,
    ) -> None:
        """`find`: what a request that waits would share; None: there are no blocks for it."""
        self._running = running
        self._prefilling = prefilling
        self._waiting = waiting
        self._rows = rows
        self._pool = pool
        self._groups = groups
        self._preempt = preempt
        self._find = find
        self._recent = recent
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
            self._preempt(heaviest(self._running))
            is_short = True
        if len(self._waiting) and not is_short:
            self._make_way(self._waiting.first)
        self._shares = self._split(budget)
        return is_short

    def take(self, request: Request, num_tokens: int) -> int:
        """How many of the prefill tokens that a request could have its tenant has a right to."""
        share = self._shares.get(request.owner.tenant)
        if share is None:
            return num_tokens
        num_tokens = min(num_tokens, share)
        self._shares[request.owner.tenant] = share - num_tokens
        return num_tokens

    def _must_relieve(self) -> bool:
        """Whether running requests of several tenants need more blocks than there are."""
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
        while self._find(claimant) is None and self._take_from_others(claimant, need, num_blocks):
            pass

    def _take_from_others(self, claimant: Request, need: int, amount: Amount) -> bool:
        found = giving_way(self._running, claimant, need, amount, self._recent.is_lighter)
        if found is not None:
            self._preempt(found)
        return found is not None

    def _split(self, budget: int) -> dict[str, int]:
        """Steps in which a tenant prefills that has had much less than another are not shared with
        that other: they are few, and short ones bring the first token sooner."""
        prefilling = list(self._prefilling)
        left = max(0, budget - len(self._running) + len(prefilling))
        if (
            len(self._waiting)
            and self._rows.has_free
            and self._find(self._waiting.first) is not None
        ):
            prefilling.append(self._waiting.first)
        demands: dict[Owner, int] = {}
        for request in prefilling:
            demands[request.owner] = demands.get(request.owner, 0) + request.backlog
        if len({owner.tenant for owner in demands}) < 2:
            return _UNBOUND
        light = [each for each in demands if self._recent.is_light(each)]
        sharing = {each.tenant: (demands[each], each.weight) for each in light or demands}
        return {**{each.tenant: 0 for each in demands}, **split(left, sharing)}


def _grows(request: Request) -> bool:
    """Whether the next token of a decoding request needs a block."""
    end = request.num_computed + 1
    return not request.is_prefilling and request.capacity < end < request.decode_end
