"""PoolJob: a validated request for numbers. PoolBuilder makes one from the fields of a body.

Its prompts may hold images and videos, and are divided into batches that workers compute at once.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from tokenmesh.services.gateway.apis.openai.sampling import refuse_not_served
from tokenmesh.services.gateway.apis.openai.translation import warn_unknown
from tokenmesh.services.gateway.apis.pooling.fields import PoolingFields, PromptFields
from tokenmesh.services.gateway.core.context import RequestContext, check_request_id
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, ProtocolError, UnknownModel
from tokenmesh.shared.ids import RequestId, WorkerId
from tokenmesh.shared.messages import Encode
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import EMBEDS, MediaItem, count_by_modality
from tokenmesh.shared.messages.pooling import PoolingParams, PoolItem, PoolTask
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import count_ids

Side = Literal["left", "right"]
FLOAT_BYTES: Final = 4
"""Of one number in an answer."""
PER_TOKEN: frozenset[PoolTask] = frozenset(("token_embed", "token_classify"))
"""Tasks that answer with a row of numbers for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob:
    """What holds for all prompts of a request."""

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
    """Of the request, for pairs that are scored."""
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
    """Whether prompts are filled up with padding tokens to the longest length."""

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


@dataclass(slots=True)
class PoolBuilder:
    """Finds the model and its task, and reads the fields that all routes share."""

    catalog: Catalog
    settings: GatewaySettings
    resolve: Callable[[str], Awaitable[None]]
    """Loads an unknown model as an adapter, or raises UnknownModel."""

    async def begin(
        self,
        body: PoolingFields,
        context: RequestContext,
        tasks: Sequence[PoolTask],
        dimensions: int | None = None,
        *,
        is_compared: bool = False,
    ) -> PoolJob:
        """A job of the first of `tasks` that the model has. Raises InvalidInput.

        is_compared: embeddings are not the answer, but what makes scores.
        """
        refuse_not_served(body)
        warn_unknown(body.unknown_fields, context.warnings)
        prompts = body if isinstance(body, PromptFields) else PromptFields()
        if prompts.request_id is not None and not context.is_own_id:
            check_request_id(prompts.request_id, "request_id", self.settings)
            context.request_id = RequestId(prompts.request_id)
        card = await self._find(body.model, context.request_id)
        context.model, context.asked_model = card.requested_name, body.model
        task = _task(card, tasks)
        if dimensions is not None:
            _check_dimensions(dimensions, card, task)
        longest, chunk_tokens = None, None
        if task == "embed" and not is_compared:
            longest, chunk_tokens = _embed_lengths(card, self.settings)
        return PoolJob(
            request_id=context.request_id,
            created=int(wall_s()),
            card=card,
            params=PoolingParams(
                task=task, use_activation=_activates(prompts), dimensions=dimensions
            ),
            priority=body.priority,
            cache_salt=self._cache_salt(prompts.cache_salt, context),
            tenant=context.access.tenant,
            truncate_tokens=_truncate_tokens(
                prompts.truncate_prompt_tokens, longest or card.max_model_len
            ),
            truncation_side=prompts.truncation_side or "right",
            deadline_s=now_s() + self.settings.request_timeout_s,
            longest=longest,
            chunk_tokens=chunk_tokens,
            pads=prompts.padding == "max_length",
        )

    async def _find(self, model: str | None, request_id: RequestId) -> ModelCard:
        try:
            return await self.catalog.find_soon(model, request_id)
        except UnknownModel:
            if model is None:
                raise
        await self.resolve(model)
        return self.catalog.find(model)

    def _cache_salt(self, given: str | None, context: RequestContext) -> str | None:
        if not self.settings.separate_prefix_caches:
            return given
        return f"{context.access.tenant.name}:{given or ''}"


def _activates(prompts: PromptFields) -> bool | None:
    """Raises InvalidInput where both names are there and disagree."""
    given = {each for each in (prompts.use_activation, prompts.normalize) if each is not None}
    if len(given) > 1:
        raise invalid("normalize", "is another name of use_activation, which says the contrary")
    return next(iter(given), None)


def _embed_lengths(card: ModelCard, settings: GatewaySettings) -> tuple[int | None, int | None]:
    """`PoolJob.longest` and `PoolJob.chunk_tokens` of an embedding."""
    if not card.embeds_in_chunks:
        return min(card.max_embed_len or card.max_model_len, card.max_model_len), None
    return card.max_embed_len or settings.max_pool_tokens, card.max_model_len


def _truncate_tokens(given: int | None, limit: int) -> int | None:
    """The tokens that a prompt is cut to; -1 is the limit. Raises InvalidInput."""
    if given is None or given == -1:
        return None if given is None else limit
    if not 0 < given <= limit:
        raise invalid(
            "truncate_prompt_tokens",
            f"is {given}, must be -1 or between 1 and the model's {limit} tokens",
        )
    return given


def _task(card: ModelCard, tasks: Sequence[PoolTask]) -> PoolTask:
    for task in tasks:
        if task in card.tasks:
            return task
    wanted = " or ".join(tasks)
    has = ", ".join([*card.tasks, *(["generate"] if card.generates else [])]) or "none"
    raise InvalidInput(
        f"the model {card.name!r} does not have the task {wanted}; its tasks: {has}", param="model"
    )


def _check_dimensions(given: int, card: ModelCard, task: PoolTask) -> None:
    if task not in ("embed", "token_embed"):
        raise invalid("dimensions", f"cannot be combined with the task {task}")
    if card.pooled_size and given > card.pooled_size:
        raise invalid("dimensions", f"is {given}, the model's embeddings have {card.pooled_size}")


Messages = list[dict[str, Any]]

_AT_ONCE: Final = 16
"""Media in one Encode, so that the answer comes before its deadline."""


def check_number_of_media(chats: Sequence[Messages], settings: GatewaySettings) -> None:
    """Raises PayloadTooLarge before any of them is fetched."""
    contents = [message.get("content") for chat in chats for message in chat]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    num_media = sum(isinstance(part, dict) and part.get("type") != "text" for part in parts)
    if num_media > settings.max_pool_media:
        raise PayloadTooLarge(
            f"the request holds {num_media} images or videos, at most {settings.max_pool_media} "
            "(gateway.max_pool_media)"
        )


def media_options(body: PromptFields) -> bytes | None:
    """`ChatPrompt.mm_processor_kwargs_json` of a request."""
    options = body.mm_processor_kwargs
    return None if options is None else msgspec.json.encode(options)


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
