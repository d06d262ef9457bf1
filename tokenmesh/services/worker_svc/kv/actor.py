"""KvActor: takes the messages of readers. It has its own mailbox, since polls wait."""

from collections.abc import Callable

from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.kv.desk import KvDesk
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.messages import (
    Done,
    Generate,
    KvReady,
    KvStarted,
    PollKv,
    PrefillKv,
    Refused,
    ReleaseKv,
)

Admit = Callable[[Generate, str | None, bool], Request | Refused]


class KvActor(Actor):
    """The messages between workers."""

    def __init__(self, desk: KvDesk, admit: Admit) -> None:
        """admit: makes a request, or says why it is not taken; the last argument is whether it
        is to be computed."""
        super().__init__()
        self._desk = desk
        self._admit = admit

    async def start(self) -> None:
        """Start the task that ends leases."""
        self.spawn(self._desk.sweep_forever, "KV leases")

    @handles(PrefillKv)
    async def prefill(self, message: PrefillKv, context: Context) -> KvStarted | Refused:
        """Lease the images of a prompt."""
        request = self._admit(message.generate, context.traceparent, message.computes)
        if isinstance(request, Refused):
            return request
        return await self._desk.start(message, request)

    @handles(PollKv)
    async def poll(self, message: PollKv, context: Context) -> KvReady:
        """Return what can be read now. Raises NotFound where the lease has ended."""
        return await self._desk.poll(message)

    @handles(ReleaseKv)
    async def release(self, message: ReleaseKv, context: Context) -> Done:
        """End a lease, which may have ended."""
        await self._desk.release(message)
        return Done()
