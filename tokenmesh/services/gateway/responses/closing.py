"""A response as its log tells it, and the end of one that nobody can go on with."""

from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.responses.event_log import Log
from tokenmesh.services.gateway.responses.records import Ended
from tokenmesh.services.gateway.responses.replay import encode_frames
from tokenmesh.services.gateway.responses.shapes import error_facts
from tokenmesh.services.gateway.tenancy.batch import TokenCounts
from tokenmesh.shared.errors import TokenMeshError

_DATA: Final = b"data: "


def response_of(log: Log) -> dict[str, Any]:
    """The Response object as it is now: items that are not complete are not in it."""
    if log.ended is not None:
        return _decode(log.ended.response)
    begun = log.begun
    assert begun is not None, "a log without a beginning is nobody's"
    response: dict[str, Any] = {
        "id": begun.id,
        "object": "response",
        "created_at": int(begun.created_s),
        "model": begun.model,
        "status": "queued" if begun.is_background else "in_progress",
        "output": [],
    }
    items = []
    for frame in log.frames:
        event = _decode(frame[frame.index(_DATA) + len(_DATA) :])
        if "response" in event:
            response = event["response"]
        elif event["type"] == "response.output_item.done":
            items.append(event["item"])
    return {**response, "output": items}


def tokens_of(ended: Ended) -> TokenCounts | None:
    """What the client of a response is told that it used; None: nothing is told."""
    usage = _decode(ended.response).get("usage")
    if usage is None:
        return None
    cached = usage["input_tokens_details"]["cached_tokens"]
    return TokenCounts(1, usage["input_tokens"], cached, usage["output_tokens"])


def cancelled(log: Log) -> Ended:
    """The end of a response that was cancelled while nobody worked on it."""
    response = {**response_of(log), "status": "cancelled"}
    return _ended("cancelled", response, log)


def failed(log: Log, error: TokenMeshError) -> Ended:
    """The end of a response that cannot be continued."""
    response = {**response_of(log), "status": "failed", "error": error_facts(error)}
    return _ended("failed", response, log)


def _ended(status: Any, response: dict[str, Any], log: Log) -> Ended:
    kind = "response.failed" if status == "failed" else "response.incomplete"
    event = {"type": kind, "sequence_number": len(log.frames), "response": response}
    return Ended(status=status, response=encode_json(response), frames=encode_frames((event,)))


def _decode(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])
