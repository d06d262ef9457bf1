"""A tenant's share of a worker: by weight, among the tenants that have streams there."""

from typing import Final

from tokenmesh.shared.messages.beat import WorkerLoad

_LEAST: Final = 0.01
_MOST: Final = 100.0


def bounded_weight(weight: float) -> float:
    """A weight of a message, which may come from anywhere on the bus, within what a key file may
    say; one that is no number counts as 1."""
    return min(_MOST, max(_LEAST, weight)) if weight == weight else 1.0


def is_within_share(load: WorkerLoad, tenant: str, weight: float, num_streams: int) -> bool:
    """Whether a tenant may have that many streams on a worker although it is full of others'.

    The engine then makes room for them. A worker of an older version, which does not tell whose
    streams it has, makes none.
    """
    others = load.tenant_weight
    if others <= 0:
        return False
    own = bounded_weight(weight)
    total = max(others, own) if tenant in load.tenant_streams else others + own
    return num_streams <= load.max_num_seqs * own / total
