"""Cohere's /v2/embed: embeddings of texts and images in several types at a time. /v1/embed is the
same."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from tokenmesh.services.gateway.apis.pooling.fields import CohereEmbedRequest, CohereType
from tokenmesh.services.gateway.apis.pooling.inputs import Side
from tokenmesh.services.gateway.apis.pooling.job_builder import check_number_of_media
from tokenmesh.services.gateway.apis.pooling.numbers import rows_of
from tokenmesh.services.gateway.apis.pooling.shapes import ApiVersion, BilledUnits, CohereMeta
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.services.gateway.core.pooling.prompts import PoolTokenizer
from tokenmesh.services.gateway.core.pooling.run import CHARS_PER_VALUE, NumbersBody, PoolRun
from tokenmesh.shared.errors import InvalidInput, PromptTooLong, field_name
from tokenmesh.shared.messages.media import IMAGE
from tokenmesh.shared.messages.pooling import Pooled, PoolItem
from tokenmesh.shared.tokens import count_ids

_PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""Names that sentence-transformers' prompts have for Cohere's purposes, besides the same name."""
_PURPOSES = ("search_query", "search_document", "classification", "clustering")
_SIGNS = ("binary", "ubinary")
_IMAGE = "image"
"""The purpose of images, which no model has a prompt for."""


def cohere_job(job: PoolJob, body: CohereEmbedRequest) -> PoolJob:
    """The job with Cohere's truncation: of the end, unless it says otherwise."""
    limit = min(body.max_tokens or job.max_tokens, job.max_tokens)
    if body.truncate == "NONE":
        return replace(job, truncate_tokens=None)
    is_start = body.truncate == "START"
    return replace(job, truncate_tokens=limit, truncation_side="left" if is_start else "right")


def cohere_side(body: CohereEmbedRequest) -> Side:
    """Return what is embedded: the one of `texts`, `images` and `inputs` that is given.

    Raises InvalidInput.
    """
    given: dict[str, list[Any] | None] = {
        "texts": body.texts,
        "images": body.images,
        "inputs": body.inputs,
    }
    names = [name for name, values in given.items() if values is not None]
    if len(names) != 1:
        raise InvalidInput("send one of texts, images and inputs", param="texts")
    (name,) = names
    values = given[name] or []
    if name == "images":
        values = [_image_part(url, index) for index, url in enumerate(values)]
    side = Side(name, values)
    if body.input_type == _IMAGE and side.texts:
        raise invalid("input_type", "image cannot be combined with texts")
    return side


def _image_part(url: str, index: int) -> dict[str, Any]:
    if not url.startswith("data:"):
        raise InvalidInput(
            f"images[{index}] must be a data URI, data:image/png;base64,...", param="images"
        )
    return {"content": [{"type": "image_url", "image_url": {"url": url}}]}


def check_takes_images(side: Side, job: PoolJob) -> None:
    """Raises InvalidInput for images, unless the model takes them."""
    if side.chats and not job.card.takes_images:
        name = field_name(side.path_of(next(iter(side.chats))))
        raise InvalidInput(f"{name}: the model {job.card.name!r} takes no images", param=side.name)


async def prompt_of(body: CohereEmbedRequest, job: PoolJob, tokenizer: PoolTokenizer) -> str:
    """Return what the model has before a text for this purpose. Raises InvalidInput."""
    purpose = body.input_type
    if purpose is None or purpose == _IMAGE:
        return ""
    described = await tokenizer.describe(job)
    for name in _PROMPT_NAMES.get(purpose, (purpose,)):
        if name in described.prompts:
            return described.prompts[name]
    if purpose in _PURPOSES:
        return ""
    known = ", ".join(dict.fromkeys((*_PURPOSES, *described.prompts)))
    raise invalid("input_type", f"{purpose[:60]!r} must be one of {known}")


class CohereAnswer:
    """Computes the embeddings of each text and image in every type that is requested."""

    def __init__(self, body: CohereEmbedRequest, side: Side, prompt: str) -> None:
        """prompt: put before each text. Raises InvalidInput where it would miss an image."""
        self._kinds: Sequence[CohereType] = list(dict.fromkeys(body.embedding_types or ("float",)))
        self._side = side
        self._prompt = prompt
        self._most_tokens = body.max_tokens
        if prompt and side.chats:
            raise invalid(
                "input_type",
                f"{body.input_type}: the model's prompt for it goes before texts, and "
                f"{side.name} holds images: send input_type image",
            )

    async def compute(self, run: PoolRun, body: NumbersBody) -> None:
        """Fill the body. Raises InvalidInput and what tokenizers and workers raise."""
        for kind in self._kinds:
            if kind in _SIGNS and run.job.width % 8:
                raise invalid(
                    "embedding_types",
                    f"{kind} needs a multiple of 8 dimensions, not {run.job.width}",
                )

        if self._side.chats:
            check_number_of_media(list(self._side.chats.values()), run.services.settings)
        try:
            items = await self._side.items(run, None, prompt=self._prompt, cuts_media=False)
        except InvalidInput as error:
            # the client has sent a URL where the side has a message with one part
            if self._side.name == "images" and error.param is not None:
                raise error.renamed(error.param.partition(".")[0]) from error
            raise
        self._check_lengths(items)
        await run.reserve(items)
        found = await run.compute(items)
        body.needs_numpy = not set(self._kinds) <= {"float", "base64"}
        body.add(b'{"id":' + encode_json(run.context.answer_id))
        body.add(b',"response_type":"embeddings_by_type","embeddings":{')
        for index, kind in enumerate(self._kinds):
            body.add(b'%b"%b":[' % (b"," if index else b"", kind.encode()))
            body.add_rows(run.job.width, [partial(_row, kind, each) for each in found], b",")
            body.add(b"]")
        body.add(b'},"texts":[')
        for index, text in enumerate(self._side.texts.values()):
            body.add(b"," if index else b"")
            body.parts.append((len(text) // CHARS_PER_VALUE, partial(encode_json, text)))
        body.add(b"]")
        units = BilledUnits(
            input_tokens=run.usage.prompt_tokens,
            image_tokens=run.media_tokens[IMAGE] or None,
            images=sum(len(item.media) for item in items) or None,
        )
        meta = CohereMeta(api_version=ApiVersion(), billed_units=units)
        body.add(b',"meta":' + encode_json(meta) + b"}")

    def _check_lengths(self, items: Sequence[PoolItem]) -> None:
        """Raises PromptTooLong for a prompt with images above `max_tokens`: it cannot be cut."""
        limit = self._most_tokens
        for index in self._side.chats:
            num_tokens = count_ids(items[index].prompt_ids)
            if limit is not None and num_tokens > limit:
                name = field_name(self._side.path_of(index))
                raise PromptTooLong(
                    f"{name} has {num_tokens} tokens, more than max_tokens, {limit}; what holds "
                    "images is not cut",
                    param="max_tokens",
                )


def _row(kind: CohereType, pooled: Pooled) -> bytes:
    if kind == "float":
        return encode_json(rows_of(pooled)[0])
    if kind == "base64":
        return encode_json(base64.b64encode(pooled.data).decode())
    # A thread runs this; numpy is not needed before.
    from tokenmesh.services.gateway.core.pooling import arrays

    return msgspec.json.encode(arrays.quantized(pooled, kind))
