"""Moderations: the labels of a classifier as OpenAI's categories."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from tokenmesh.services.gateway.apis.pooling.fields import ClassificationRequest
from tokenmesh.services.gateway.apis.pooling.inputs import read_items
from tokenmesh.services.gateway.apis.pooling.numbers import add_list, rows_of
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.pooling.run import NumbersBody, PoolRun
from tokenmesh.shared.config.requests import PoolingSettings
from tokenmesh.shared.errors import InvalidInput, ProtocolError
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.pooling import Pooled

CATEGORIES: Final = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
SAFE: Final = "safe"
"""Stands for a label without a category."""
_ROW_VALUES: Final = 128
"""It holds what a result counts as: many are written in a thread."""
_OPENAI_MODELS: Final = ("omni-moderation", "text-moderation")
_CATEGORY_BY_LABEL: Final[Mapping[str, str]] = {
    **{re.sub(r"[^a-z0-9]", "", each): each for each in CATEGORIES},
    **dict.fromkeys(("toxic", "toxicity", "insult", "offensive", "abusive"), "harassment"),
    **dict.fromkeys(("severetoxic", "severetoxicity", "obscene", "profanity"), "harassment"),
    **dict.fromkeys(("bullying", "hr"), "harassment"),
    **dict.fromkeys(("threat", "threatening"), "harassment/threatening"),
    **dict.fromkeys(("hatespeech", "identityhate", "identityattack", "hateful", "h"), "hate"),
    "h2": "hate/threatening",
    **dict.fromkeys(("suicide", "sh"), "self-harm"),
    **dict.fromkeys(("sexualexplicit", "nsfw", "porn", "s"), "sexual"),
    "s3": "sexual/minors",
    **dict.fromkeys(("violent", "v"), "violence"),
    **dict.fromkeys(("graphic", "v2"), "violence/graphic"),
    **dict.fromkeys(("criminal", "crime", "illegal"), "illicit"),
    **dict.fromkeys(("ok", "safe", "neutral", "normal", "none", "nottoxic", "nontoxic"), SAFE),
    **dict.fromkeys(("nothate", "nonhate", "notoffensive", "nonoffensive", "sfw", "clean"), SAFE),
}
"""By a label's letters and digits; the short ones are those of models trained on OpenAI's data."""


class ModerationRequest(Bounded, extra="allow", strict=True):
    input: str | list[str] | list[dict[str, Any]] = Field(
        description="A text, several, or the parts of one, of type text."
    )
    model: Annotated[str | None, Field(description="Default: the only classifier.")] = None

    def texts(self) -> list[str]:
        """One text for each result. Raises InvalidInput."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise invalid("input", "is empty")
        texts = [each for each in self.input if isinstance(each, str)]
        if texts:
            return texts
        parts = [_text_of(part, index) for index, part in enumerate(self.input)]
        return ["\n".join(parts)]


def _text_of(part: Any, index: int) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind == "image_url":
        raise NotSupported(f"input[{index}]: images are not moderated", param="input")
    if kind != "text" or not isinstance(text, str):
        raise InvalidInput(f"input[{index}] must be a part of type text", param="input")
    return text


def classifier_name(given: str | None, cards: Sequence[ModelCard], names: Sequence[str]) -> str:
    """The classifier that a request means. `names`: all that are served.

    OpenAI's names and none mean the only one. Raises InvalidInput.
    """
    if given is not None and (given in names or not given.startswith(_OPENAI_MODELS)):
        return given
    classifiers = sorted({card.name for card in cards if "classify" in card.tasks})
    if len(classifiers) == 1:
        return classifiers[0]
    if not classifiers:
        raise InvalidInput(
            "no classifier is served: moderations need a model with the task classify",
            param="model",
        )
    raise invalid("model", f"must be one of {', '.join(classifiers)[:300]}")


def categories_of(labels: Sequence[str], settings: PoolingSettings) -> list[str]:
    """The category of each label; `SAFE` for one without, a label's own name for others.

    Raises InvalidInput for a model of whose labels none is known.
    """
    found = [_category_of(label, settings.moderation_labels) for label in labels]
    if not any(each in CATEGORIES for each in found):
        shown = ", ".join(labels)[:300] or "none"
        raise InvalidInput(
            f"the model's labels ({shown}) match no category of moderations; "
            "gateway.moderation_labels can name their categories",
            param="model",
        )
    return [each or label for each, label in zip(found, labels, strict=True)]


def _category_of(label: str, own: Mapping[str, str]) -> str | None:
    if label in own:
        return own[label]
    return _CATEGORY_BY_LABEL.get(re.sub(r"[^a-z0-9]", "", label.lower()))


class ModerationResult(msgspec.Struct, kw_only=True):
    """The result for one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]
    """Empty for a category that the model has no label for: its score is always 0."""


class ModerationResults(msgspec.Struct, kw_only=True):
    """The body of /v1/moderations."""

    id: str
    model: str
    results: list[ModerationResult]


async def moderate(texts: list[str], run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with a result for each text."""
    settings, labels = run.services.settings, run.job.card.labels
    categories = categories_of(labels, settings)
    items = await read_items(run, ClassificationRequest(input=texts))
    await run.reserve(items)
    found = await run.compute(items)
    for pooled in found:
        if pooled.shape != [len(labels)]:
            raise ProtocolError(f"{pooled.shape} numbers for {len(labels)} labels")
    threshold = settings.moderation_threshold
    rows = [partial(_row, categories, pooled, threshold) for pooled in found]
    frame = ModerationResults(
        id=run.context.request_id, model=run.job.card.requested_name, results=[]
    )
    add_list(body, frame, _ROW_VALUES, rows, b"results")


def _row(categories: Sequence[str], pooled: Pooled, threshold: float) -> bytes:
    (scores,) = rows_of(pooled)
    return encode_json(result_of(categories, scores, threshold))


def result_of(
    categories: Sequence[str], scores: Sequence[float], threshold: float
) -> ModerationResult:
    """A category has the largest score of its labels."""
    best: dict[str, float] = {}
    for category, score in zip(categories, scores, strict=True):
        if category != SAFE:
            best[category] = max(score, best.get(category, 0.0))
    names = dict.fromkeys((*CATEGORIES, *best))
    flags = {name: best.get(name, 0.0) >= threshold for name in names}
    return ModerationResult(
        flagged=any(flags.values()),
        categories=flags,
        category_scores={name: best.get(name, 0.0) for name in names},
        category_applied_input_types={name: ["text"] if name in best else [] for name in names},
    )
