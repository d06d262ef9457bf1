"""A tenant's share of a worker: by weight, among the tenants that have streams there."""

from typing import Final

from tokenmesh.shared.messages.beat import WorkerLoad

_LEAST: Final = 0.01
_MOST: Final = 100.0
"""The bounds of `weight` in a key file; a message may hold any number."""
_ROUNDING: Final = 1 + 1e-9
"""Weights are floats: a tenant that is exactly at its share must not be over it."""
MUCH_LESS: Final = 0.5
"""A tenant has had much less than another below this share of what that one has had, by weight."""


def bounded_weight(weight: float) -> float:
    """A weight of a message, which may come from any client of NATS, within the bounds of a key
    file; NaN counts as 1."""
    return min(_MOST, max(_LEAST, weight)) if weight == weight else 1.0


def is_within_share(load: WorkerLoad, tenant: str, weight: float, num_streams: int) -> bool:
    """Return whether a tenant may have that many streams on a worker although it is full of
    others'.

    One that has had much less than another lately may have more than its share of this moment. The
    engine then makes room for them. A worker of an older version, which does not report the tenants
    of its streams, makes none.
    """
    others = load.tenant_weight
    if others <= 0:
        return False
    levels = load.tenant_levels
    if tenant in levels and levels[tenant] < MUCH_LESS * max(levels.values()):
        return num_streams <= load.max_num_seqs
    own = bounded_weight(weight)
    total = max(others, own) if tenant in load.tenant_streams else others + own
    return num_streams * total <= load.max_num_seqs * own * _ROUNDING
