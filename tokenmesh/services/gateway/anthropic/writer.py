"""MessagesWriter: the answer of /v1/messages."""

from typing import Any, Final

from tokenmesh.services.gateway.anthropic.content import ContentBlocks, Step, collect
from tokenmesh.services.gateway.anthropic.errors import error_body
from tokenmesh.services.gateway.anthropic.shapes import MessageBody, message_usage, stop_of
from tokenmesh.services.gateway.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.shared.errors import TokenMeshError

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesWriter:
    """A `Writer`. A message has one choice."""

    def __init__(
        self, ask: GenerationRequest, places: Places, *, shows_thinking: bool = True
    ) -> None:
        self._ask = ask
        self._places = places
        self._blocks = ContentBlocks(ask.head.id, shows_thinking=shows_thinking)
        self._stop: tuple[str, str | None] = ("end_turn", None)

    keep_alive = PING

    def begin(self, delivery: Delivery) -> bytes:
        """See `Writer.begin`."""
        message = self._message(delivery, [])
        message.usage.output_tokens = 0
        return _frame({"type": "message_start", "message": message})

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """See `Writer.write`."""
        return b"".join([_frame(step) for piece in pieces for step in self._steps(piece)])

    def end(self, delivery: Delivery) -> bytes:
        """See `Writer.end`."""
        reason, sequence = self._stop
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": message_usage(delivery.usage()),
        }
        return _frame(ending) + _frame({"type": "message_stop"})

    def fail(self, error: TokenMeshError) -> bytes:
        """See `Writer.fail`."""
        told = self._places.rename(error)
        body = error_body(told.status, told.message, told.param, self._ask.head.id)
        return b"event: error\ndata: " + encode_json(body) + b"\n\n"

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> MessageBody:
        """See `Writer.whole`."""
        (piece,) = merge(pieces, 1)
        message = self._message(delivery, collect(self._steps(piece)))
        message.stop_reason, message.stop_sequence = self._stop
        return message

    def _steps(self, piece: OutputChunk) -> list[Step]:
        steps = list(self._blocks.push(piece.all_events()))
        if piece.finish_reason is not None:
            steps.extend(self._blocks.finish())
            self._stop = stop_of(piece.finish_reason, piece.stop_reason)
        return steps

    def _message(self, delivery: Delivery, content: list[dict[str, Any]]) -> MessageBody:
        head, usage = self._ask.head, message_usage(delivery.usage())
        return MessageBody(id=head.id, model=head.model, content=content, usage=usage)


def _frame(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
