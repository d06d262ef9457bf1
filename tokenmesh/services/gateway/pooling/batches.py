"""Batches: the prompts of a request, divided into parts that workers compute at once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.services.gateway.pooling.job import FLOAT_BYTES, PER_TOKEN, PoolJob
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.media import count_by_modality
from tokenmesh.shared.messages.pooling import PoolItem
from tokenmesh.shared.tokens import count_ids

_MAX_BATCH_ITEMS: Final = 256
_INLINE_BYTES: Final = 64 * 1024
"""Numbers of one item up to this size are in the answer itself, larger ones in a blob."""
_INLINE_TOTAL_BYTES: Final = 1024 * 1024
"""Such numbers of a batch together, and its token ids."""
_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Numbers of one batch together, blobs included."""


@dataclass(slots=True)
class PoolBatch:
    """Some items of a request, by their numbers."""

    indices: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0
    """Numbers of the answer."""
    num_inline: int = 0
    """Of these, bytes in the message itself."""
    media_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of the prompts that stand for media, by modality."""
    cached_tokens: int = 0
    """Set by the answer."""
    worker_id: WorkerId | None = None
    """Set by the answer: the worker that has computed it."""


def split(
    job: PoolJob, items: Sequence[PoolItem], most_tokens: int, max_message_bytes: int
) -> Iterator[PoolBatch]:
    """Batches of prompts of similar length, the longest first."""
    most_inline = min(_INLINE_TOTAL_BYTES, max_message_bytes // 2)
    lengths = [count_ids(item.prompt_ids) for item in items]
    is_per_token, width = job.params.task in PER_TOKEN, job.width
    batch = PoolBatch()
    for index in sorted(range(len(items)), key=lengths.__getitem__, reverse=True):
        num_tokens = lengths[index]
        num_bytes = width * FLOAT_BYTES * (num_tokens if is_per_token else 1)
        num_inline = min(num_bytes, _INLINE_BYTES) + len(items[index].prompt_ids)
        if batch.indices and (
            batch.num_tokens + num_tokens > most_tokens
            or batch.num_bytes + num_bytes > _BATCH_BYTES
            or batch.num_inline + num_inline > most_inline
            or len(batch.indices) >= _MAX_BATCH_ITEMS
        ):
            yield batch
            batch = PoolBatch()
        batch.indices.append(index)
        batch.num_tokens += num_tokens
        batch.num_bytes += num_bytes
        batch.num_inline += num_inline
        batch.media_tokens.update(count_by_modality(items[index].media))
    if batch.indices:
        yield batch
