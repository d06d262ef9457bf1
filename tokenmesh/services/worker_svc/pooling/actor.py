"""PoolingActor: takes the Pools of a model that pools; the WorkerActor controls it.

It has its own mailbox, since a Pool is answered when it is computed: Pools that wait must not delay
a ping or a cancellation.
"""

from collections.abc import Callable

from tokenmesh.services.worker_svc.pooling.desk import PoolDesk
from tokenmesh.services.worker_svc.streams import WorkerStream
from tokenmesh.services.worker_svc.telemetry import sampled
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages import Generate, Pool, PoolAnswer, Refused


class PoolingActor(Actor):
    """Answers Pool, and refuses Generate by name."""

    def __init__(
        self, desk: PoolDesk, check: Callable[[Pool], WorkerStream | Refused | None]
    ) -> None:
        """check: `Intake.check`, before a Pool is read."""
        super().__init__()
        self._desk = desk
        self._check = check

    @handles(Pool)
    async def pool(self, message: Pool, context: Context) -> PoolAnswer | Refused:
        """Compute the numbers of all items."""
        known = self._check(message)
        if isinstance(known, Refused):
            return known
        if known is not None:
            # it was answered, or its cancellation was here first
            return Refused(reason=f"attempt {message.attempt} is here", retry_after_s=0.0)
        return await self._desk.answer(message, sampled(context.traceparent))

    @handles(Generate)
    async def generate(self, message: Generate, context: Context) -> Refused:
        """Raises InvalidInput: nothing is generated here."""
        raise InvalidInput("this model pools; it does not generate text", param="model")
