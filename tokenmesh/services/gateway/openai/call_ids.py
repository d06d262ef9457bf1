"""Ids of tool calls: the model's own, or made of the response's id and so the same each time."""

from hashlib import blake2b
from typing import Final

from tokenmesh.services.gateway.parsers.events import CallBegin

_DIGEST_BYTES: Final = 16


def call_id(response_id: str, choice: int, call: CallBegin) -> str:
    """The same for the same call of the same response, whichever gateway asks."""
    if call.model_id is not None:
        return call.model_id
    place = f"{response_id}\0{choice}\0{call.index}".encode()
    return f"chatcmpl-tool-{blake2b(place, digest_size=_DIGEST_BYTES).hexdigest()}"
