"""Head: what every chunk and body of one response begins with."""

from dataclasses import dataclass

from tokenmesh.services.gateway.http.sse import encode_json


@dataclass(frozen=True, slots=True)
class Head:
    """Identity of a response."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    service_tier: str | None = None
    """Told to clients that have asked for one."""


def tier_field(head: Head) -> bytes:
    """The tier as a further field of a chunk; nothing unless a client has asked for one."""
    if head.service_tier is None:
        return b""
    return b',"service_tier":' + encode_json(head.service_tier)
