"""EncoderActor: answers Encode for every model of the process that has a tower."""

import asyncio
from collections.abc import Mapping

from tokenmesh.services.mm_encoder_svc.batcher import Batcher
from tokenmesh.services.mm_encoder_svc.embeddings import Embeddings
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.errors import PayloadTooLarge, UnknownModel
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages.media import Encode, Encoded, MediaItem
from tokenmesh.shared.metrics import Metrics


class EncoderActor(Actor):
    def __init__(
        self,
        models: Mapping[ModelName, Embeddings],
        batchers: list[Batcher],
        max_items: int,
        *,
        metrics: Metrics,
        instance_id: InstanceId,
    ) -> None:
        self._models = models
        self._batchers = batchers
        self._max_items = max_items
        self._metrics = metrics
        self._instance_id = instance_id

    async def start(self) -> None:
        for number, batcher in enumerate(self._batchers):
            self.spawn(batcher.run, f"batcher {number}")

    async def stop(self) -> None:
        """Stop the towers' threads."""
        for batcher in self._batchers:
            batcher.stop()

    @handles(Encode)
    async def encode_media(self, message: Encode, context: Context) -> Encoded:
        """Answer with the embeddings of each item; an item that appears twice is encoded once."""
        embeddings = self._models.get(message.model)
        if embeddings is None:
            raise UnknownModel(
                f"this encoder does not serve the model {message.model!r}", param="model"
            )
        if len(message.items) > self._max_items:
            raise PayloadTooLarge(f"{len(message.items)} media items, at most {self._max_items}")
        known = message.items[: max(0, message.num_known)]
        obtained = await _obtained(embeddings, message, known)
        cached = sum(not was_computed for _, was_computed in obtained)
        labels = {"model_name": message.model, "engine": self._instance_id}
        self._metrics.counter("mm_cache_queries", **labels).inc(len(obtained))
        self._metrics.counter("mm_cache_hits", **labels).inc(cached)
        return Encoded(
            items=[*known, *(item for item, _ in obtained)],
            cached=cached,
        )


async def _obtained(
    embeddings: Embeddings, message: Encode, known: list[MediaItem]
) -> list[tuple[MediaItem, bool]]:
    """The other items. Parts of speech are encoded one after the other."""
    wanted = message.items[len(known) :]
    if all(item.follows is None for item in wanted):
        return await asyncio.gather(*(embeddings.obtain(item) for item in wanted))
    found = []
    for number, item in enumerate(wanted, start=len(known)):
        found.append(await embeddings.obtain(item, message.items[:number]))
    return found
