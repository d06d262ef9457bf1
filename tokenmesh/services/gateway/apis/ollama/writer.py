"""Responses of Ollama's API: of /api/chat and /api/generate, whole or as lines, and embeddings."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.pooling.fields import EmbeddingRequest
from tokenmesh.services.gateway.apis.pooling.inputs import read_items
from tokenmesh.services.gateway.apis.pooling.numbers import add_list, rows_of
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.pooling.run import NumbersBody, PoolRun
from tokenmesh.services.gateway.parsers.parser import CallBegin, Content, Reasoning
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.pooling import Pooled

LINES_HEADERS: Final = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
INVALID_ARGUMENTS: Final = "__invalid_json__"
"""Key of the arguments of a call that the model wrote wrong: they are its value, as text."""
_NS_PER_S: Final = 1_000_000_000


def rfc3339(time_s: float) -> str:
    """A wall time as Ollama writes it."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * _NS_PER_S))


class OllamaWriter:
    """The `BodyWriter` of a chat (`is_chat`), or of a prompt. Calls are written once complete."""

    keep_alive = b""
    """Clients parse each line, and an empty one is not JSON."""

    def __init__(
        self, model: str, started_s: float, *, is_chat: bool, is_raw: bool = False
    ) -> None:
        """`is_raw`: all text is the answer."""
        self._model = model
        self._started_s = started_s
        self._first_s: float | None = None
        self._is_chat = is_chat
        self._is_raw = is_raw
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        self._reason = "stop"

    def begin(self, delivery: Delivery) -> bytes:
        return b""

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        content, thinking = self._read(pieces)
        if not content and not thinking:
            return b""
        return _line(self._body(content, thinking) | {"done": False})

    def end(self, delivery: Delivery) -> bytes:
        calls = self._calls()
        lines = b""
        if calls:
            lines = _line(self._body("", "", calls) | {"done": False})
        return lines + _line(self._body("", "") | self._ending(delivery))

    def fail(self, error: TokenMeshError) -> bytes:
        return _line({"error": error.message})

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> Json:
        content, thinking = self._read(pieces)
        return self._body(content, thinking, self._calls()) | self._ending(delivery)

    def _read(self, pieces: list[OutputChunk]) -> tuple[str, str]:
        """The new content and reasoning; calls are collected."""
        if self._first_s is None:
            self._first_s = monotonic_s()
        content, thinking = [], []
        for piece in pieces:
            if piece.finish_reason == "length":
                self._reason = "length"
            if self._is_raw:
                content.append(piece.text)
                continue
            for event in piece.all_events():
                if isinstance(event, Content):
                    content.append(event.text)
                elif isinstance(event, Reasoning):
                    thinking.append(event.text)
                elif isinstance(event, CallBegin):
                    self._names[event.index] = event.name
                else:
                    known = self._arguments.get(event.index, "")
                    self._arguments[event.index] = known + event.text
        return "".join(content), "".join(thinking)

    def _calls(self) -> list[Json]:
        return [
            {"function": {"index": index, "name": name, "arguments": self._arguments_of(index)}}
            for index, name in sorted(self._names.items())
        ]

    def _arguments_of(self, index: int) -> Json:
        text = self._arguments.get(index, "") or "{}"
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            return {INVALID_ARGUMENTS: text}

    def _body(self, content: str, thinking: str, calls: list[Json] | None = None) -> Json:
        body: Json = {"model": self._model, "created_at": rfc3339(wall_s())}
        if not self._is_chat:
            return body | {"response": content} | ({"thinking": thinking} if thinking else {})
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return body | {"message": message}

    def _ending(self, delivery: Delivery) -> Json:
        usage, now_s = delivery.usage(), monotonic_s()
        first_s = self._first_s if self._first_s is not None else now_s
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": nanoseconds(now_s - self._started_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first_s - self._started_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(now_s - first_s),
        }


def _line(value: Json) -> bytes:
    return encode_json(value) + b"\n"


WHOLE_MODEL: Final = -1
"""As truncate_prompt_tokens: cut to what the model takes."""


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The body of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """The body of /api/embeddings."""

    embedding: list[float]


async def embed(request: EmbeddingRequest, model: str, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the embeddings of all texts."""
    found = await _compute(request, run)
    frame = OllamaEmbeddings(
        model=model,
        embeddings=[],
        total_duration=nanoseconds(monotonic_s() - run.context.started_s),
        prompt_eval_count=run.usage.prompt_tokens,
    )
    rows = [partial(_row, pooled) for pooled in found]
    add_list(body, frame, found[0].shape[0], rows, b"embeddings")


async def embed_one(request: EmbeddingRequest, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the embedding of one text."""
    (pooled,) = await _compute(request, run)
    body.add(b'{"embedding":')
    body.add_rows(pooled.shape[0], [partial(_row, pooled)], b",")
    body.add(b"}")


async def _compute(request: EmbeddingRequest, run: PoolRun) -> Sequence[Pooled]:
    items = await read_items(run, request)
    await run.reserve(items)
    return await run.compute(items)


def _row(pooled: Pooled) -> bytes:
    (row,) = rows_of(pooled)
    return encode_json(row)
