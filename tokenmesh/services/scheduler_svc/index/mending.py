"""Mender: reservations that no scheduler wrote are forgotten, and placement goes on by the index.

What is forgotten makes workers look a little less busy until the streams that were placed meanwhile
have their first token.
"""

import logging
from collections.abc import Sequence
from typing import Final

from tokenmesh.services.scheduler_svc.index.index import Bid, Weighed
from tokenmesh.shared.errors import TokenMeshError, Unavailable
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

_MOST_TOKENS: Final = 1 << 34
_MOST_STREAMS: Final = 1 << 18


def is_absurd(weighed: Sequence[Weighed]) -> bool:
    """Whether more is reserved than any scheduler would, or less than nothing."""
    return any(
        abs(each.reserved_tokens) > _MOST_TOKENS or abs(each.reserved_streams) > _MOST_STREAMS
        for each in weighed
    )


def is_refusal(error: Exception) -> bool:
    """Whether Redis has answered, and what it found under the keys is not ours."""
    return isinstance(error, TokenMeshError) and not isinstance(error, Unavailable)


class Mender:
    """Deletes what schedulers keep of a model."""

    def __init__(self, redis: Redis, metrics: Metrics) -> None:
        self._redis = redis
        self._mends = metrics.counter("prefix_index_mends")

    async def mend(self, model: ModelName, bids: Sequence[Bid]) -> None:
        """Forget all reservations of a model; raises nothing."""
        self._mends.inc()
        keys = IndexKeys(model)
        names = [keys.reserved(bid.worker_id, bid.epoch) for bid in bids]
        try:
            await self._redis.call("DEL", *names)
        except TokenMeshError as error:
            logger.info("the reservations in the index are not mended: %s", error)
