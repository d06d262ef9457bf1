"""The routes that answer with numbers: embeddings, pooling, classes, scores, reranking."""

from functools import partial
from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.translation import FieldNames
from tokenmesh.services.gateway.apis.pooling.cohere import (
    CohereAnswer,
    check_takes_images,
    cohere_job,
    cohere_side,
    prompt_of,
)
from tokenmesh.services.gateway.apis.pooling.fields import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from tokenmesh.services.gateway.apis.pooling.inputs import check_input
from tokenmesh.services.gateway.apis.pooling.job_builder import PoolBuilder
from tokenmesh.services.gateway.apis.pooling.moderations import (
    ModerationRequest,
    categories_of,
    classifier_name,
    moderate,
)
from tokenmesh.services.gateway.apis.pooling.numbers import NumbersAnswer, classify
from tokenmesh.services.gateway.apis.pooling.scores import (
    SCORE_TASKS,
    rerank,
    rerank_pairs,
    score,
    score_pairs,
    scoring_job,
    template_names,
)
from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint, Post
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.pooling import PoolTask
from tokenmesh.shared.telemetry import span

MODERATIONS: Final = "/v1/moderations"
BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/embed": CohereEmbedRequest,
    "/v2/embed": CohereEmbedRequest,
    "/pooling": PoolingRequest,
    "/classify": ClassificationRequest,
    MODERATIONS: ModerationRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
}
_POOLING_TASKS: Final[tuple[PoolTask, ...]] = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
)


class _PoolingRoutes:
    """The functions of the routes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._settings = core.settings
        self._begin = PoolBuilder(core).begin
        self._pool = core.pool

    async def create_embeddings(self, request: Request) -> Response:
        """Embed texts, token ids or conversations."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, EmbeddingRequest, self._settings)
            check_input(body)
            job = await self._begin(body, context, ("embed",), body.dimensions)
        return self._pool(job, NumbersAnswer(body, is_pooling=False).compute)

    async def create_pooling(self, request: Request) -> Response:
        """The numbers of any task, also those of each token."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, PoolingRequest, self._settings)
            check_input(body)
            job = await self._begin(body, context, _pooling_tasks(body), body.dimensions)
        return self._pool(job, NumbersAnswer(body, is_pooling=True).compute)

    async def create_classification(self, request: Request) -> Response:
        """The probabilities of a classifier's labels."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ClassificationRequest, self._settings)
            check_input(body)
            job = await self._begin(body, context, ("classify",))
        return self._pool(job, partial(classify, body))

    async def create_moderation(self, request: Request) -> Response:
        """The labels of a classifier as OpenAI's categories."""
        context, catalog = context_of(request.scope), self._core.mesh.catalog
        with span("validate"):
            body = await read_json(request, ModerationRequest, self._settings)
            texts, cards = body.texts(), catalog.all()
            names = [name for card in cards for name in catalog.names(card)]
            model = classifier_name(body.model, cards, names)
            fields = ClassificationRequest(model=model, input=texts)
            check_input(fields)
            job = await self._begin(fields, context, ("classify",))
            categories_of(job.card.labels, self._settings)
        return self._pool(job, partial(moderate, texts))

    async def create_score(self, request: Request) -> Response:
        """Return how well pairs of texts fit together."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ScoreRequest, self._settings)
            pairs = score_pairs(body)
            job = await self._begin(body, context, SCORE_TASKS, is_compared=True)
            job = scoring_job(job, body)
            context.rename_error = template_names(body).rename
        return self._pool(job, partial(score, pairs))

    async def create_rerank(self, request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, RerankRequest, self._settings)
            pairs = rerank_pairs(body)
            job = await self._begin(body, context, SCORE_TASKS, is_compared=True)
            job = scoring_job(job, body)
            context.rename_error = template_names(body).rename
        return self._pool(job, partial(rerank, body, pairs))

    async def create_cohere_embeddings(self, request: Request) -> Response:
        """Embed texts or images as Cohere's API does."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CohereEmbedRequest, self._settings)
            context.rename_error = FieldNames({"dimensions": "output_dimension"}, {}).rename
            side = cohere_side(body)
            job = await self._begin(body, context, ("embed",), body.output_dimension)
            check_takes_images(side, job)
            prompt = await prompt_of(body, job, self._core.pooling.tokenizer)
            answer = CohereAnswer(body, side, prompt)
        return self._pool(cohere_job(job, body), answer.compute)


def pooling_posts(core: Core) -> dict[str, Post]:
    """The routes by path."""
    routes = _PoolingRoutes(core)
    by_body: dict[type[BaseModel], Endpoint] = {
        EmbeddingRequest: routes.create_embeddings,
        CohereEmbedRequest: routes.create_cohere_embeddings,
        PoolingRequest: routes.create_pooling,
        ClassificationRequest: routes.create_classification,
        ModerationRequest: routes.create_moderation,
        ScoreRequest: routes.create_score,
        RerankRequest: routes.create_rerank,
    }
    return {path: Post(by_body[body], body, "pooling") for path, body in BODIES.items()}


def _pooling_tasks(body: PoolingRequest) -> tuple[PoolTask, ...]:
    if body.task is None:
        return _POOLING_TASKS
    if body.task == "plugin":
        raise invalid("task", "'plugin' is not supported yet", NotSupported)
    if body.task == "score":
        raise InvalidInput("task: pairs are scored by /score, not here", param="task")
    return (body.task,)
