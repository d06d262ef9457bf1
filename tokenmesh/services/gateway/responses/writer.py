"""ResponseWriter: the answer of /v1/responses where nothing is stored: one turn, and gone."""

from typing import Any

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.services.gateway.responses.events import ResponseEvents
from tokenmesh.services.gateway.responses.frames import frames
from tokenmesh.services.gateway.responses.recorder import Event
from tokenmesh.services.gateway.responses.shapes import usage_fields
from tokenmesh.shared.errors import TokenMeshError


class ResponseWriter:
    """A `Writer`."""

    keep_alive = sse.COMMENT

    def __init__(self, events: ResponseEvents, places: Places) -> None:
        self._events = events
        self._places = places
        self._has_begun = False

    def begin(self, delivery: Delivery) -> bytes:
        """See `Writer.begin`."""
        return frames(self._begin())

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """See `Writer.write`."""
        return frames(self._write(pieces))

    def end(self, delivery: Delivery) -> bytes:
        """See `Writer.end`."""
        return frames(self._end(delivery))

    def fail(self, error: TokenMeshError) -> bytes:
        """See `Writer.fail`."""
        # The stream may have begun with no more than what keeps it alive.
        return frames(self._begin() + self._events.fail(self._places.rename(error)))

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> dict[str, Any]:
        """See `Writer.whole`."""
        self._write(pieces)
        self._end(delivery)
        return self._events.response

    def _write(self, pieces: list[OutputChunk]) -> list[Event]:
        return self._begin() + self._events.write(pieces)

    def _begin(self) -> list[Event]:
        has_begun, self._has_begun = self._has_begun, True
        return [] if has_begun else self._events.begin()

    def _end(self, delivery: Delivery) -> list[Event]:
        ended = self._events.end_turn(delivery.prompts[0].packed_ids)
        return ended + self._events.complete(usage_fields([delivery.usage()]))
