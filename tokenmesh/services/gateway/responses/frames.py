"""Events as server-sent events: each under its type's name, and no [DONE] behind the last."""

from collections.abc import Iterable

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.responses.recorder import Event


def frames(events: Iterable[Event]) -> bytes:
    """One frame an event."""
    return b"".join(
        [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
            for event in events
        ]
    )
