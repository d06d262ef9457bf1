"""Who gives way to whom: rows and blocks are shared by weight, and nobody is held to a share that
no other wants.

A tenant below its share takes from the one furthest above its own, the latest request first; what
that one knew is computed again, so its stream goes on with the very same tokens. A tenant that has
had much less lately may take more than its share of this moment.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tokenmesh.services.worker_svc.engine.block_tables import held_by
from tokenmesh.services.worker_svc.engine.owner import Owner
from tokenmesh.services.worker_svc.engine.request import Request

Amount = Callable[[Request], int]
"""What a running request holds of something that is scarce."""
IsLighter = Callable[[Owner, Owner], bool]
"""Whether the first has had much less than the second lately."""


@dataclass(slots=True)
class _Holding:
    last: Request
    """Of the tenant's running requests the one that is served last."""
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
    """Whose room `claimant` gets, which needs that much: somebody's of no smaller class who still
    has no less than the claimant's tenant then, by weight, or at least something where the claimant
    has had much less lately; never somebody's who has had much less itself."""
    holdings = _holdings(running, amount)
    mine = holdings.pop(claimant.owner.tenant, None)
    target = ((mine.total if mine else 0) + need) / claimant.owner.weight
    found, most = None, 0.0
    for each in holdings.values():
        owner = each.last.owner
        left = (each.total - amount(each.last)) / owner.weight
        if owner.group < claimant.owner.group or is_lighter(owner, claimant.owner):
            continue
        if left > most and (left >= target or is_lighter(claimant.owner, owner)):
            found, most = each.last, left
    return found


def heaviest(running: Iterable[Request]) -> Request:
    """Who gives way when running requests need more blocks than there are; one must be running."""
    holdings = _holdings(running, num_blocks).values()
    return max(holdings, key=lambda each: (each.last.owner.group, each.total / _weight(each))).last


def split(total: int, demands: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    """Tokens of a step by tenant, from what each asks for and its weight.

    Nobody gets more than it asks for, nothing is left while somebody asks for more (but for what
    rounding down leaves), and whoever asks for less than its share gets all of it. At least one.
    """
    shares: dict[str, int] = {}
    weight = sum(weight for _, weight in demands.values())
    for tenant, (asked, own) in sorted(demands.items(), key=lambda item: item[1][0] / item[1][1]):
        share = total * min(1.0, own / weight) if weight > 0 else total
        shares[tenant] = max(1, min(asked, int(share)))
        total = max(0, total - shares[tenant])
        weight -= own
    return shares


def _weight(holding: _Holding) -> float:
    return holding.last.owner.weight


def _holdings(running: Iterable[Request], amount: Amount) -> dict[str, _Holding]:
    """By tenant; `running` is in service order."""
    found: dict[str, _Holding] = {}
    for request in running:
        holding = found.get(request.owner.tenant)
        if holding is None:
            holding = found[request.owner.tenant] = _Holding(request)
        holding.last = request
        holding.total += amount(request)
    return found
