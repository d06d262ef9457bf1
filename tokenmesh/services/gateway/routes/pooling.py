"""The routes that answer with numbers: embeddings, pooling, classes, scores, reranking."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.openai.translation import FieldNames
from tokenmesh.services.gateway.pooling.cohere import (
    CohereAnswer,
    check_takes_images,
    cohere_job,
    cohere_side,
    prompt_of,
)
from tokenmesh.services.gateway.pooling.fields import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreFields,
    ScoreRequest,
)
from tokenmesh.services.gateway.pooling.inputs import check_input
from tokenmesh.services.gateway.pooling.job import PoolJob
from tokenmesh.services.gateway.pooling.moderations import (
    ModerationRequest,
    categories_of,
    classifier_name,
    moderate,
)
from tokenmesh.services.gateway.pooling.numbers import NumbersAnswer, classify
from tokenmesh.services.gateway.pooling.scores import (
    SCORE_TASKS,
    rerank,
    rerank_pairs,
    score,
    score_pairs,
)
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
    "token_embed",
    "token_classify",
    "embed",
    "classify",
)


def pooling_endpoints(gateway: Gateway) -> dict[str, Endpoint]:
    """The functions of the routes by path."""
    makers: dict[type[BaseModel], Callable[[Gateway], Endpoint]] = {
        EmbeddingRequest: _embeddings_endpoint,
        CohereEmbedRequest: _embed_endpoint,
        PoolingRequest: _pooling_endpoint,
        ClassificationRequest: _classify_endpoint,
        ModerationRequest: _moderations_endpoint,
        ScoreRequest: _score_endpoint,
        RerankRequest: _rerank_endpoint,
    }
    return {path: makers[body](gateway) for path, body in BODIES.items()}


def _embeddings_endpoint(gateway: Gateway) -> Endpoint:
    async def create_embeddings(request: Request) -> Response:
        """Embed texts, token ids or conversations."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, EmbeddingRequest, gateway.settings)
            check_input(body)
            job = await gateway.pool_builder.begin(body, context, ("embed",), body.dimensions)
        return gateway.pool(job, NumbersAnswer(body, is_pooling=False).compute)

    return create_embeddings


def _pooling_endpoint(gateway: Gateway) -> Endpoint:
    async def create_pooling(request: Request) -> Response:
        """The numbers of any task, also those of each token."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, PoolingRequest, gateway.settings)
            check_input(body)
            tasks = _pooling_tasks(body)
            job = await gateway.pool_builder.begin(body, context, tasks, body.dimensions)
        return gateway.pool(job, NumbersAnswer(body, is_pooling=True).compute)

    return create_pooling


def _pooling_tasks(body: PoolingRequest) -> tuple[PoolTask, ...]:
    if body.task is None:
        return _POOLING_TASKS
    if body.task == "plugin":
        raise NotSupported("task 'plugin' is not supported yet", param="task")
    if body.task == "score":
        raise InvalidInput("task: pairs are scored by /score, not here", param="task")
    return (body.task,)


def _classify_endpoint(gateway: Gateway) -> Endpoint:
    async def create_classification(request: Request) -> Response:
        """The probabilities of a classifier's labels."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ClassificationRequest, gateway.settings)
            check_input(body)
            job = await gateway.pool_builder.begin(body, context, ("classify",))
        return gateway.pool(job, partial(classify, body))

    return create_classification


def _moderations_endpoint(gateway: Gateway) -> Endpoint:
    async def create_moderation(request: Request) -> Response:
        """The labels of a classifier as OpenAI's categories."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ModerationRequest, gateway.settings)
            texts, cards = body.texts(), gateway.catalog.all()
            names = [name for card in cards for name in gateway.catalog.names(card)]
            model = classifier_name(body.model, cards, names)
            fields = ClassificationRequest(model=model, input=texts)
            check_input(fields)
            job = await gateway.pool_builder.begin(fields, context, ("classify",))
            categories_of(job.card.labels, gateway.settings)
        return gateway.pool(job, partial(moderate, texts))

    return create_moderation


def _score_endpoint(gateway: Gateway) -> Endpoint:
    async def create_score(request: Request) -> Response:
        """How well pairs of texts fit together."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ScoreRequest, gateway.settings)
            pairs = score_pairs(body)
            job = await gateway.pool_builder.begin(body, context, SCORE_TASKS)
        return gateway.pool(_with_lengths(job, body), partial(score, pairs))

    return create_score


def _rerank_endpoint(gateway: Gateway) -> Endpoint:
    async def create_rerank(request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, RerankRequest, gateway.settings)
            pairs = rerank_pairs(body)
            job = await gateway.pool_builder.begin(body, context, SCORE_TASKS)
        return gateway.pool(_with_lengths(job, body), partial(rerank, body, pairs))

    return create_rerank


def _with_lengths(job: PoolJob, body: ScoreFields) -> PoolJob:
    return replace(
        job,
        max_text_tokens=body.max_tokens_per_query or None,
        max_pair_tokens=body.max_tokens_per_doc or None,
    )


def _embed_endpoint(gateway: Gateway) -> Endpoint:
    async def create_cohere_embeddings(request: Request) -> Response:
        """Embed texts or images as Cohere's API does."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CohereEmbedRequest, gateway.settings)
            context.rename_error = FieldNames({"dimensions": "output_dimension"}, {}).rename
            side = cohere_side(body)
            job = await gateway.pool_builder.begin(body, context, ("embed",), body.output_dimension)
            check_takes_images(side, job)
            prompt = await prompt_of(body, job, gateway.calls, gateway.settings)
            answer = CohereAnswer(body, side, prompt)
        return gateway.pool(cohere_job(job, body), answer.compute)

    return create_cohere_embeddings
