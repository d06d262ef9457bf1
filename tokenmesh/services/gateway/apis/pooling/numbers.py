"""The answers of /v1/embeddings, /pooling and /classify: a list with the numbers of each input."""

import base64
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.pooling.fields import (
    ClassificationRequest,
    EmbedDtype,
    Endianness,
    NumberFields,
)
from tokenmesh.services.gateway.apis.pooling.inputs import read_items
from tokenmesh.services.gateway.apis.pooling.shapes import (
    ClassificationList,
    ClassProbabilities,
    Embedding,
    EmbeddingList,
    NumberList,
    PoolingData,
    PoolingList,
)
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.pooling.run import NumbersBody, PoolRun
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.messages.pooling import Pooled, PoolItem

_METADATA: Final = b"metadata"

Row = Callable[[], bytes]


def rows_of(pooled: Pooled) -> list[list[float]]:
    """The numbers by row; one row of a task that answers once for each prompt."""
    numbers = array("f", pooled.data)
    if sys.byteorder != "little":
        numbers.byteswap()
    width, values = pooled.shape[-1], numbers.tolist()
    return [values[start : start + width] for start in range(0, len(values), width)]


def to_bytes(pooled: Pooled, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """The numbers as bytes; little-endian unless `endianness` is big."""
    if dtype == "float32" and endianness != "big":
        return pooled.data
    # A thread runs this; numpy is not needed before.
    from tokenmesh.services.gateway.core.pooling import arrays

    return arrays.to_bytes(pooled, dtype, is_big_endian=endianness == "big")


def _needs_numpy(request: NumberFields) -> bool:
    return request.embed_dtype != "float32" or request.endianness == "big"


class NumbersAnswer:
    """Computes /v1/embeddings and /pooling."""

    def __init__(self, body: NumberFields, *, is_pooling: bool) -> None:
        """`is_pooling`: in the shape of /pooling."""
        self._request = body
        self._is_pooling = is_pooling

    async def compute(self, run: PoolRun, body: NumbersBody) -> None:
        """Fill the body. Raises InvalidInput and what tokenizers and workers raise."""
        request = self._request
        items = await read_items(run, request)
        self._check_number(items, run)
        await run.reserve(items)
        found = await run.compute(items)
        if request.encoding_format in ("bytes", "bytes_only"):
            self._add_bytes(run, found, body)
            return
        body.needs_numpy = request.encoding_format == "base64" and _needs_numpy(request)
        frame = frame_of(PoolingList if self._is_pooling else EmbeddingList, run)
        rows = [partial(self._row, index, pooled) for index, pooled in enumerate(found)]
        add_list(body, frame, run.num_values(items) // len(items), rows)

    def _check_number(self, items: Sequence[PoolItem], run: PoolRun) -> None:
        limit = run.services.settings.max_described_inputs
        if self._request.encoding_format == "bytes" and len(items) > limit:
            raise invalid(
                "encoding_format",
                f"bytes describes at most {limit} inputs in its header, not "
                f"{len(items)}: use bytes_only",
            )

    def _row(self, index: int, pooled: Pooled) -> bytes:
        request = self._request
        if request.encoding_format == "base64":
            packed = to_bytes(pooled, request.embed_dtype, request.endianness)
            text = base64.b64encode(packed).decode()
            if self._is_pooling:
                return encode_json(PoolingData(index=index, data=text))
            return encode_json(Embedding(index=index, embedding=text))
        rows = rows_of(pooled)
        if self._is_pooling:
            data: list[Any] = rows if len(pooled.shape) > 1 else rows[0]
            return encode_json(PoolingData(index=index, data=data))
        return encode_json(Embedding(index=index, embedding=rows[0]))

    def _add_bytes(self, run: PoolRun, found: Sequence[Pooled], body: NumbersBody) -> None:
        request = self._request
        dtype, endianness = request.embed_dtype, request.endianness
        headers = [(b"content-type", b"application/octet-stream")]
        if request.encoding_format == "bytes":
            headers.append((_METADATA, encode_json(self._metadata(run, found))))
        body.headers = headers
        size = max((len(pooled.data) // 4 for pooled in found), default=0)
        body.add_rows(size, [partial(to_bytes, each, dtype, endianness) for each in found], b"")

    def _metadata(self, run: PoolRun, found: Sequence[Pooled]) -> dict[str, object]:
        """Where each input's numbers are in the body."""
        request, data, start = self._request, [], 0
        for index, pooled in enumerate(found):
            end = start + len(pooled.data) // 4 * _SIZES[request.embed_dtype]
            data.append(
                {
                    "index": index,
                    "embed_dtype": request.embed_dtype,
                    "endianness": request.endianness,
                    "start": start,
                    "end": end,
                    "shape": pooled.shape,
                }
            )
            start = end
        return {
            "id": run.context.answer_id,
            "created": run.job.created,
            "model": run.job.card.requested_name,
            "data": data,
            "usage": run.usage,
        }


_SIZES: Final[dict[EmbedDtype, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of a number."""


def frame_of(kind: type[NumberList[Any]], run: PoolRun) -> NumberList[Any]:
    """A list without its rows, for `add_list`."""
    return kind(
        id=run.context.answer_id,
        created=run.job.created,
        model=run.job.card.requested_name,
        data=[],
        usage=run.usage,
    )


def add_list(
    body: NumbersBody,
    frame: msgspec.Struct,
    num_values: int,
    rows: Sequence[Row],
    field: bytes = b"data",
) -> None:
    """Append a frame with an empty list, which is filled by rows of `num_values` numbers each."""
    empty = b'"%b":[]' % field
    head, _, tail = encode_json(frame).partition(empty)
    body.add(head + empty[:-1])
    body.add_rows(num_values, rows, b",")
    body.add(b"]" + tail)


async def classify(request: ClassificationRequest, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the classes of each input."""
    items = await read_items(run, request)
    await run.reserve(items)
    found = await run.compute(items)
    labels = run.job.card.labels
    frame = frame_of(ClassificationList, run)
    for pooled in found:
        if labels and pooled.shape != [len(labels)]:
            raise ProtocolError(f"{pooled.shape} numbers for {len(labels)} labels")
    rows = [partial(_classes, index, pooled, labels) for index, pooled in enumerate(found)]
    add_list(body, frame, found[0].shape[0], rows)


def _classes(index: int, pooled: Pooled, labels: Sequence[str]) -> bytes:
    (probs,) = rows_of(pooled)
    best = max(range(len(probs)), key=probs.__getitem__)
    label = labels[best] if labels else None
    return encode_json(
        ClassProbabilities(index=index, label=label, probs=probs, num_classes=len(probs))
    )
