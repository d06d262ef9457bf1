"""Split: which of several models a request gets that asks for the name they share."""

import hashlib
import math
from collections.abc import Mapping
from typing import Final

_RANGE: Final = 1 << 64


def in_order(weights: Mapping[str, float], request_id: str) -> list[str]:
    """The models, the request's own first, then where it goes while that one is not served.

    The same id always gets the same order. When a model comes or goes only its own share moves
    (weighted rendezvous hashing). Without an id the heaviest comes first.
    """
    if not request_id:
        return sorted(weights, key=lambda model: (-weights[model], model))
    return sorted(weights, key=lambda model: (_distance(model, request_id) / weights[model], model))


def _distance(model: str, request_id: str) -> float:
    """Exponentially distributed: the least of several, each over its weight, is fair."""
    digest = hashlib.sha256(f"{model}\0{request_id}".encode()).digest()
    return -math.log((int.from_bytes(digest[:8], "big") + 1) / (_RANGE + 1))
