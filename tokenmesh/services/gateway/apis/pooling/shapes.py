"""Response bodies of the routes that answer with numbers, as msgspec structs."""

from typing import Generic, TypeVar

import msgspec

from tokenmesh.services.gateway.core.generation.usage import Usage

_RowT = TypeVar("_RowT")


class NumberList(msgspec.Struct, Generic[_RowT], kw_only=True):
    """The numbers of each input, in their order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[_RowT]
    usage: Usage


class Embedding(msgspec.Struct, kw_only=True):
    """One embedding; a string is base64."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingList(NumberList[Embedding], kw_only=True):
    """The body of /v1/embeddings."""


class PoolingData(msgspec.Struct, kw_only=True):
    """The numbers of one input; a row for each token where the task is one of tokens."""

    index: int
    object: str = "pooling"
    data: list[list[float] | float] | str


class PoolingList(NumberList[PoolingData], kw_only=True):
    """The body of /pooling."""


class ClassProbabilities(msgspec.Struct, kw_only=True):
    """The classes of one input."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(NumberList[ClassProbabilities], kw_only=True):
    """The body of /classify."""


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreList(NumberList[Score], kw_only=True):
    """The body of /score."""


class RankedDocument(msgspec.Struct):
    """A document as the request had it."""

    text: str


class RankedResult(msgspec.Struct, kw_only=True):
    """One document and its score; the best ones come first."""

    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    """Left out with `return_documents` false, and of an image."""
    relevance_score: float


class RerankUsage(msgspec.Struct):
    """Tokens of a reranking."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(msgspec.Struct):
    version: str = "2"


class BilledUnits(msgspec.Struct, omit_defaults=True):
    """It holds what Cohere's clients read usage from."""

    input_tokens: int | None = None
    image_tokens: int | None = None
    """Those of `input_tokens` that stand for images."""
    images: int | None = None
    search_units: int | None = None


class CohereMeta(msgspec.Struct, kw_only=True):
    """Facts about a response in Cohere's form."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct, kw_only=True):
    """The body of the rerank routes: Jina's and vLLM's fields, and Cohere's `meta`."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RankedResult]
    meta: CohereMeta


class CohereEmbeddings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Embeddings by type, in the order of the texts."""

    float_: list[list[float]] | None = msgspec.field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    """The body of /v2/embed."""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
