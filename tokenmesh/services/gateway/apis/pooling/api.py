"""Embeddings, classes, scores and reranking of several APIs, as the table of APIs has them."""

from typing import Final

import msgspec
from pydantic import BaseModel

from tokenmesh.services.gateway.apis.pooling import generative_route, routes, shapes
from tokenmesh.services.gateway.apis.pooling.fields import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from tokenmesh.services.gateway.apis.pooling.generative import (
    GenerativeScores,
    GenerativeScoringRequest,
)
from tokenmesh.services.gateway.apis.pooling.moderations import ModerationRequest, ModerationResults
from tokenmesh.services.gateway.core.api import (
    EMBEDDING_OPERATION,
    AnswerKind,
    AnswerShape,
    Api,
    Routes,
)
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.endpoint import Post


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    scoring = Post(generative_route.scoring_endpoint(core), GenerativeScoringRequest)
    return Routes(posts={generative_route.PATH: scoring, **routes.pooling_posts(core)})


_KINDS: Final[dict[type[BaseModel], AnswerKind]] = {
    EmbeddingRequest: AnswerKind("embd", EMBEDDING_OPERATION),
    CohereEmbedRequest: AnswerKind("embd", EMBEDDING_OPERATION),
    PoolingRequest: AnswerKind("pooling"),
    ClassificationRequest: AnswerKind("classify"),
    ModerationRequest: AnswerKind("modr"),
    ScoreRequest: AnswerKind("score"),
    RerankRequest: AnswerKind("rerank"),
}
_SHAPES: Final[dict[type[BaseModel], type[msgspec.Struct]]] = {
    EmbeddingRequest: shapes.EmbeddingList,
    CohereEmbedRequest: shapes.CohereEmbedResponse,
    PoolingRequest: shapes.PoolingList,
    ClassificationRequest: shapes.ClassificationList,
    ModerationRequest: ModerationResults,
    ScoreRequest: shapes.ScoreList,
    RerankRequest: shapes.RerankResponse,
}


POOLING: Final = Api(
    name="pooling",
    build=build,
    answer_kinds={
        generative_route.PATH: AnswerKind("generative-scoring"),
        **{path: _KINDS[body] for path, body in routes.BODIES.items()},
    },
    answers={
        ("post", generative_route.PATH): AnswerShape([GenerativeScores]),
        **{("post", path): AnswerShape([_SHAPES[body]]) for path, body in routes.BODIES.items()},
    },
)
