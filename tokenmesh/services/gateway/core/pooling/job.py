"""PoolJob: a validated request for numbers.

Its prompts may hold images and videos, and are divided into batches that workers compute at once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import RequestId, WorkerId
from tokenmesh.shared.messages import Encode
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import EMBEDS, MediaItem, count_by_modality
from tokenmesh.shared.messages.pooling import PoolingParams, PoolItem, PoolTask
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import count_ids

Side = Literal["left", "right"]
FLOAT_BYTES: Final = 4
"""This is the size of one number in an answer."""
PER_TOKEN: frozenset[PoolTask] = frozenset(("token_embed", "token_classify"))
"""Tasks that answer with a row of numbers for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob:
    """It holds what holds for all prompts of a request."""

    request_id: RequestId
    created: int
    """Unix seconds."""
    card: ModelCard
    params: PoolingParams
    priority: int
    cache_salt: str | None
    tenant: Tenant
    truncate_tokens: int | None = None
    """Keep at most so many tokens of a prompt; None: a longer one is refused."""
    truncation_side: Side = "right"
    max_text_tokens: int | None = None
    """Keep at most so many tokens of a first text."""
    max_pair_tokens: int | None = None
    """The same of a second text."""
    pair_template: str | None = None
    """This is the template of the request, for pairs that are scored."""
    pair_kwargs: bytes | None = None
    """Variables of the template for pairs, as JSON."""
    deadline_s: float
    """Absolute, wall clock."""
    keep_alive_s: float | None = None
    """As in PromptJob."""
    longest: int | None = None
    """Tokens that a prompt may have; None: as many as the model takes."""
    chunk_tokens: int | None = None
    """A longer prompt is embedded in parts of so many tokens."""
    pads: bool = False
    """It tells whether prompts are filled up with padding tokens to the longest length."""

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt may have."""
        return self.longest or self.card.max_model_len

    @property
    def width(self) -> int:
        """Numbers of one row of an answer."""
        if self.params.task == "score":
            return 1
        return self.params.dimensions or max(1, self.card.pooled_size)


_AT_ONCE: Final = 16
"""Media in one Encode, so that the answer comes before its deadline."""


async def with_embeddings(
    calls: ServiceCalls, job: PoolJob, items: list[PoolItem]
) -> list[PoolItem]:
    """The items with embeddings of their media. Raises what the calls of encoders raise."""
    media = [each for item in items for each in item.media if each.kind != EMBEDS]
    if not media:
        return items
    attributes: dict[str, str | int] = {
        REQUEST_ID: job.request_id,
        "tokenmesh.items": len(media),
    }
    encoded: list[MediaItem] = []
    with span("encode_media", attributes) as current:
        cached = 0
        for start in range(0, len(media), _AT_ONCE):
            part = media[start : start + _AT_ONCE]
            message = Encode(request_id=job.request_id, model=job.card.name, items=part)
            answer = await calls.encode(message, job.deadline_s)
            if len(answer.items) != len(part):
                raise ProtocolError(f"{len(answer.items)} embeddings for {len(part)} media")
            encoded += answer.items
            cached += answer.cached
        current.set_attribute("tokenmesh.cached", cached)
    found = iter(encoded)
    return [
        msgspec.structs.replace(
            item, media=[each if each.kind == EMBEDS else next(found) for each in item.media]
        )
        for item in items
    ]


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
    """This is the number, of these, bytes in the message itself."""
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
