"""Cohere's /v2/embed: embeddings of texts in several types at a time."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.pooling.fields import CohereEmbedRequest, CohereType
from tokenmesh.services.gateway.pooling.job import PoolJob
from tokenmesh.services.gateway.pooling.numbers import rows_of
from tokenmesh.services.gateway.pooling.response import CHARS_PER_VALUE, NumbersBody
from tokenmesh.services.gateway.pooling.run import PoolRun
from tokenmesh.services.gateway.pooling.scores import text_of
from tokenmesh.services.gateway.pooling.shapes import ApiVersion, BilledUnits, CohereMeta
from tokenmesh.shared import subjects
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import FieldPath, InvalidInput
from tokenmesh.shared.messages import Describe, Described
from tokenmesh.shared.messages.pooling import Pooled

_PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""Names that sentence-transformers' prompts have for Cohere's purposes, besides the same name."""
_PURPOSES = ("search_query", "search_document", "classification", "clustering")
_SIGNS = ("binary", "ubinary")


def cohere_job(job: PoolJob, body: CohereEmbedRequest) -> PoolJob:
    """The job with Cohere's truncation: of the end, unless it says otherwise."""
    limit = min(body.max_tokens or job.card.max_model_len, job.card.max_model_len)
    if body.truncate == "NONE":
        return replace(job, truncate_tokens=None)
    is_start = body.truncate == "START"
    return replace(job, truncate_tokens=limit, truncation_side="left" if is_start else "right")


def cohere_texts(body: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The name of the field that is given, and its texts. Raises InvalidInput."""
    if (body.texts is None) == (body.inputs is None):
        raise InvalidInput("send either texts or inputs", param="texts")
    if body.texts is not None:
        return "texts", body.texts
    inputs = body.inputs or []
    return "inputs", [text_of(each, ("inputs", index)) for index, each in enumerate(inputs)]


async def prompt_of(
    body: CohereEmbedRequest, job: PoolJob, calls: ServiceCalls, settings: GatewaySettings
) -> str:
    """What the model has before a text for this purpose. Raises InvalidInput."""
    purpose = body.input_type
    if purpose is None:
        return ""
    timeout_s = settings.tokenize_timeout_s
    described = await calls.request(
        subjects.tokenize(job.card.name),
        Describe(model=job.card.name),
        Described,
        timeout_s=timeout_s,
        deadline_s=now_s() + timeout_s,
    )
    for name in _PROMPT_NAMES.get(purpose, (purpose,)):
        if name in described.prompts:
            return described.prompts[name]
    if purpose in _PURPOSES:
        return ""
    known = ", ".join(dict.fromkeys((*_PURPOSES, *described.prompts)))
    raise InvalidInput(f"input_type {purpose[:60]!r} must be one of {known}", param="input_type")


class CohereAnswer:
    def __init__(self, body: CohereEmbedRequest, field: str, texts: list[str], prompt: str) -> None:
        """`field`: the field that holds the texts; `prompt` is put before each of them."""
        self._kinds: Sequence[CohereType] = list(dict.fromkeys(body.embedding_types or ("float",)))
        self._field = field
        self._texts = texts
        self._prompt = prompt

    async def compute(self, run: PoolRun, body: NumbersBody) -> None:
        """Fill the body. Raises InvalidInput and what tokenizers and workers raise."""
        for kind in self._kinds:
            if kind in _SIGNS and run.job.width % 8:
                raise InvalidInput(
                    f"embedding_types {kind} needs a multiple of 8 dimensions, not {run.job.width}",
                    param="embedding_types",
                )

        def path_of(_kind: str, index: int) -> FieldPath:
            return self._field, index

        texts = [self._prompt + text for text in self._texts] if self._prompt else self._texts
        items = await run.services.tokenizer.texts(run.job, texts, path_of)
        await run.reserve(items)
        found = await run.compute(items)
        body.needs_numpy = not set(self._kinds) <= {"float", "base64"}
        body.add(b'{"id":' + encode_json(run.context.request_id))
        body.add(b',"response_type":"embeddings_by_type","embeddings":{')
        for index, kind in enumerate(self._kinds):
            body.add(b'%b"%b":[' % (b"," if index else b"", kind.encode()))
            body.add_rows(run.job.width, [partial(_row, kind, each) for each in found], b",")
            body.add(b"]")
        body.add(b'},"texts":[')
        for index, text in enumerate(self._texts):
            body.add(b"," if index else b"")
            body.parts.append((len(text) // CHARS_PER_VALUE, partial(encode_json, text)))
        body.add(b"]")
        units = BilledUnits(input_tokens=run.usage.prompt_tokens)
        meta = CohereMeta(api_version=ApiVersion(), billed_units=units)
        body.add(b',"meta":' + encode_json(meta) + b"}")


def _row(kind: CohereType, pooled: Pooled) -> bytes:
    if kind == "float":
        return encode_json(rows_of(pooled)[0])
    if kind == "base64":
        return encode_json(base64.b64encode(pooled.data).decode())
    # A thread runs this; numpy is not needed before.
    from tokenmesh.services.gateway.pooling import arrays

    return msgspec.json.encode(arrays.quantized(pooled, kind))
