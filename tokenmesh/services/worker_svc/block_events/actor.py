"""BlockEventsActor: answers subscribers that missed events or begin from nothing."""

from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.messages import (
    BlockEventsReplayed,
    BlocksRead,
    ReadBlocks,
    ReplayBlockEvents,
)


class BlockEventsActor(Actor):
    """Has its own mailbox, so that requests of subscribers never delay a Generate."""

    def __init__(self, stream: BlockEventStream) -> None:
        super().__init__()
        self._stream = stream

    async def start(self) -> None:
        self.spawn(self._stream.run, "block events")

    async def stop(self) -> None:
        """Publish what is left."""
        await self._stream.close()

    @handles(ReplayBlockEvents)
    async def replay(self, message: ReplayBlockEvents, context: Context) -> BlockEventsReplayed:
        return self._stream.replay(message.epoch, message.from_seq)

    @handles(ReadBlocks)
    async def read(self, message: ReadBlocks, context: Context) -> BlocksRead:
        """All blocks, page by page."""
        return self._stream.read(message.snapshot, message.start)
