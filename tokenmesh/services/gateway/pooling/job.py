"""PoolJob: a validated request for numbers. PoolBuilder makes one from the fields of a body."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenmesh.services.gateway.context import RequestContext, check_request_id
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.openai.sampling import refuse_not_served
from tokenmesh.services.gateway.pooling.fields import PoolingFields, PromptFields
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, UnknownModel
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.pooling import PoolingParams, PoolTask

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
    deadline_s: float
    """Absolute, wall clock."""
    keep_alive_s: float | None = None
    """As in PromptJob."""

    @property
    def width(self) -> int:
        """Numbers of one row of an answer."""
        if self.params.task == "score":
            return 1
        return self.params.dimensions or max(1, self.card.pooled_size)


class PoolBuilder:
    """Finds the model and its task, and reads the fields that all routes share."""

    def __init__(
        self,
        catalog: Catalog,
        settings: GatewaySettings,
        resolve: Callable[[str], Awaitable[None]],
    ) -> None:
        """`resolve` loads an unknown model as an adapter, or raises UnknownModel."""
        self._catalog = catalog
        self._settings = settings
        self._resolve = resolve

    async def begin(
        self,
        body: PoolingFields,
        context: RequestContext,
        tasks: Sequence[PoolTask],
        dimensions: int | None = None,
    ) -> PoolJob:
        """A job of the first of `tasks` that the model has. Raises InvalidInput."""
        refuse_not_served(body)
        if body.unknown_fields:
            names = ", ".join(name[:64] for name in body.unknown_fields[:16])
            context.warnings.append(f"unknown fields ignored: {names}")
        prompts = body if isinstance(body, PromptFields) else PromptFields()
        if prompts.request_id is not None and not context.is_own_id:
            check_request_id(prompts.request_id, "request_id", self._settings)
            context.request_id = RequestId(prompts.request_id)
        card = await self._find(body.model, context.request_id)
        context.model, context.asked_model = card.requested_name, body.model
        task = _task(card, tasks)
        if dimensions is not None:
            _check_dimensions(dimensions, card, task)
        return PoolJob(
            request_id=context.request_id,
            created=int(wall_s()),
            card=card,
            params=PoolingParams(
                task=task, use_activation=prompts.use_activation, dimensions=dimensions
            ),
            priority=body.priority,
            cache_salt=self._cache_salt(prompts.cache_salt, context),
            tenant=context.access.tenant,
            truncate_tokens=_truncate_tokens(prompts.truncate_prompt_tokens, card),
            truncation_side=prompts.truncation_side or "right",
            deadline_s=now_s() + self._settings.request_timeout_s,
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


def _truncate_tokens(given: int | None, card: ModelCard) -> int | None:
    """The tokens that a prompt is cut to; -1 is the model's length. Raises InvalidInput."""
    limit = card.max_model_len
    if given is None or given == -1:
        return None if given is None else limit
    if not 0 < given <= limit:
        raise InvalidInput(
            f"truncate_prompt_tokens is {given}, must be -1 or between 1 and the model's {limit} "
            "tokens",
            param="truncate_prompt_tokens",
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
        raise InvalidInput(
            f"dimensions cannot be combined with the task {task}", param="dimensions"
        )
    if card.pooled_size and given > card.pooled_size:
        raise InvalidInput(
            f"dimensions is {given}, the model's embeddings have {card.pooled_size}",
            param="dimensions",
        )
