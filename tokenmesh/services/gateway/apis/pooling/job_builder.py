"""PoolBuilder: makes a PoolJob from the fields of a body."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmesh.services.gateway.apis.openai.sampling import refuse_not_served
from tokenmesh.services.gateway.apis.openai.translation import warn_unknown
from tokenmesh.services.gateway.apis.pooling.fields import PoolingFields, PromptFields
from tokenmesh.services.gateway.core.context import RequestContext, check_request_id
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.requests import PoolingSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, UnknownModel
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.pooling import PoolingParams, PoolTask


class PoolBuilder:
    """Finds the model and its task, and reads the fields that all routes share."""

    def __init__(self, core: Core) -> None:
        self._catalog = core.mesh.catalog
        self._settings = core.settings
        self._resolve = core.adapters.resolve

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
            check_request_id(prompts.request_id, "request_id")
            context.request_id = RequestId(prompts.request_id)
        card = await self._find(body.model, context.request_id)
        context.model, context.asked_model = card.requested_name, body.model
        task = _task(card, tasks)
        if dimensions is not None:
            _check_dimensions(dimensions, card, task)
        longest, chunk_tokens = None, None
        if task == "embed" and not is_compared:
            longest, chunk_tokens = _embed_lengths(card, self._settings)
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
            deadline_s=now_s() + self._settings.request_timeout_s,
            longest=longest,
            chunk_tokens=chunk_tokens,
            pads=prompts.padding == "max_length",
        )

    async def _find(self, model: str | None, request_id: RequestId) -> ModelCard:
        try:
            return await self._catalog.find_soon(model, request_id)
        except UnknownModel:
            if model is None:
                raise
        await self._resolve(model)
        return self._catalog.find(model)

    def _cache_salt(self, given: str | None, context: RequestContext) -> str | None:
        if not self._settings.separate_prefix_caches:
            return given
        return f"{context.access.tenant.name}:{given or ''}"


def _activates(prompts: PromptFields) -> bool | None:
    """Raises InvalidInput where both names are there and disagree."""
    given = {each for each in (prompts.use_activation, prompts.normalize) if each is not None}
    if len(given) > 1:
        raise invalid("normalize", "is another name of use_activation, which says the contrary")
    return next(iter(given), None)


def _embed_lengths(card: ModelCard, settings: PoolingSettings) -> tuple[int | None, int | None]:
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


def check_number_of_media(chats: Sequence[Messages], settings: PoolingSettings) -> None:
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
