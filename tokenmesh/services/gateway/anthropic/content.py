"""Content: what a model writes as content blocks, piece by piece.

Streams send the steps as they are; a whole answer is what all of them amount to.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash
from pydantic_core import from_json

from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)

Step = dict[str, Any]
"""A content_block_start, content_block_delta or content_block_stop event."""


class ContentBlocks:
    """One answer's blocks: each begins where the kind of text changes."""

    def __init__(self, message_id: str, *, shows_thinking: bool = True) -> None:
        self._message_id = message_id
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind = ""
        self._blank = ""
        self._thoughts = hashlib.sha256()

    def push(self, events: Iterable[Event]) -> Iterator[Step]:
        """The steps that these events make."""
        for event in events:
            if isinstance(event, Content):
                yield from self._push_text(event.text)
            elif isinstance(event, Reasoning):
                yield from self._push_thinking(event.text)
            elif isinstance(event, CallBegin):
                yield from self._begin_call(event)
            elif isinstance(event, CallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})

    def finish(self) -> Iterator[Step]:
        """The end of the last block."""
        if self._kind == "thinking":
            signature = self._thoughts.hexdigest()
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = self._blank = ""

    def _push_text(self, text: str) -> Iterator[Step]:
        """Clients could not send a block of nothing but white space back: none is begun for it."""
        if self._kind != "text":
            self._blank += text
            if not text.strip():
                return
            text = self._blank
            yield from self._begin("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _push_thinking(self, text: str) -> Iterator[Step]:
        if self._kind != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begin("thinking", block)
            self._thoughts = hashlib.sha256()
        self._thoughts.update(text.encode())
        if self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _begin_call(self, event: CallBegin) -> Iterator[Step]:
        hashed = xxhash.xxh3_128_hexdigest(f"{self._message_id}:{event.index}".encode())
        call_id = event.model_id or f"toolu_{hashed}"
        block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
        yield from self._begin("tool_use", block)

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Step]:
        yield from self.finish()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Step:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def collect(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """The blocks that all steps of an answer amount to."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for step in steps:
        if step["type"] == "content_block_start":
            blocks.append(dict(step["content_block"]))
        elif step["type"] == "content_block_delta":
            delta = step["delta"]
            if delta["type"] == "input_json_delta":
                index = step["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
                continue
            name = delta["type"].removesuffix("_delta")
            blocks[-1][name] += delta[name]
    for index, text in arguments.items():
        blocks[index]["input"] = _parse(text)
    return blocks


def _parse(text: str) -> dict[str, Any]:
    """What there is of a call that the model did not finish is kept, too."""
    try:
        value = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
