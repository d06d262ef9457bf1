"""Publisher: step outputs from the engine to the gateways, spans and metrics.

One `Tokens` message for each gateway, with the tokens of all steps since the last one.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenmesh.engine.core.outputs import EndedStream, StepOutput
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.services.worker_svc.prefix_index.writer import IndexWriter
from tokenmesh.services.worker_svc.streams import WorkerStream, WorkerStreams
from tokenmesh.services.worker_svc.telemetry import WorkerMetrics, record_spans
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import BusLost, PayloadTooLarge
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.tokens import Delta, Tokens
from tokenmesh.shared.tokens import count_ids

logger = logging.getLogger(__name__)


class Publisher:
    """Sends deltas and records them in `streams`; a gateway requests again what was lost."""

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        epoch: int,
        streams: WorkerStreams,
        meters: WorkerMetrics,
        index: IndexWriter | None = None,
        block_events: BlockEventStream | None = None,
        on_pooled: Callable[[EndedStream], None] | None = None,
    ) -> None:
        """index: reports the prefix cache to schedulers. block_events: to subscribers outside.
        on_pooled: called with each request with `pooling` that has ended."""
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._streams = streams
        self._meters = meters
        self._index = index
        self._block_events = block_events
        self._on_pooled = on_pooled
        self._step = 0

    async def publish(self, outputs: Sequence[StepOutput]) -> None:
        """Everything of one or several steps, oldest first."""
        if outputs:
            self._step = outputs[-1].step
        for gateway, deltas in _by_gateway(outputs).items():
            for delta in deltas:
                stream = self._streams.find(delta, gateway)
                if stream is not None:
                    self._streams.record(stream, delta)
            await self.send(gateway, deltas)
        for output in outputs:
            self._note(output)

    def _note(self, output: StepOutput) -> None:
        now = monotonic_s()
        for ended in output.ended:
            if ended.request.spec.pooling is None:
                self._end_stream(ended.request.key, now)
            elif self._on_pooled is not None:
                self._on_pooled(ended)
            record_spans(ended)
        if self._index is not None:
            self._index.note_progress(output.prefilling)
            if output.routes is not None:
                self._index.note(output.routes)
        if output.blocks and self._block_events is not None:
            self._block_events.note(output.blocks)
        self._meters.note(output)

    def _end_stream(self, key: StreamKey, now: float) -> None:
        stream = self._streams.get(key.gateway, key.stream)
        if stream is not None and stream.key == key:
            self._streams.end(stream, now)

    async def break_off(self, stream: WorkerStream, ending: Ending) -> None:
        """End a stream that was not submitted to the engine; others are left alone."""
        if stream.is_submitted or stream.ended_s is not None:
            return
        key, offset = stream.key, stream.first_offset
        delta = Delta(key.stream, key.attempt, offset, b"", ending.reason, error=ending.error)
        self._streams.record(stream, delta)
        self._streams.end(stream, monotonic_s())
        await self.send(key.gateway, [delta])

    async def send(self, gateway: GatewayId, deltas: Iterable[Delta]) -> None:
        """One message to one gateway, or one for each delta when that is too large."""
        message = Tokens(self._worker_id, self._epoch, self._step, list(deltas))
        try:
            await self._bus.publish(subjects.gateway_tokens(gateway), message)
        except BusLost as error:
            logger.warning(
                "cannot send tokens to gateway %s: %s",
                gateway,
                error.message,
            )
        except PayloadTooLarge as error:
            if len(message.deltas) > 1:
                for delta in message.deltas:
                    await self.send(gateway, [delta])
            elif message.deltas[0].error is None:
                await self.send(gateway, [_too_large(message.deltas[0], error)])


def _by_gateway(outputs: Sequence[StepOutput]) -> Mapping[GatewayId, list[Delta]]:
    """The deltas of all steps; the tokens of a stream without log-probabilities as one."""
    if len(outputs) == 1:
        return outputs[0].deltas
    joined: dict[GatewayId, list[Delta]] = {}
    for gateway in dict.fromkeys(gateway for output in outputs for gateway in output.deltas):
        runs: dict[tuple[int, int], list[Delta]] = {}
        for output in outputs:
            for delta in output.deltas.get(gateway, ()):
                runs.setdefault((delta.stream, delta.attempt), []).append(delta)
        joined[gateway] = [delta for run in runs.values() for delta in _join(run)]
    return joined


def _join(run: list[Delta]) -> list[Delta]:
    """Neighbours of one attempt as one delta, where none of them is large."""
    first, last = run[0], run[-1]
    is_large = any(each.logprobs or each.prompt_logprobs or each.alignment for each in run)
    if first is last or is_large:
        return run
    token_ids = b"".join([each.token_ids for each in run])
    if last.offset + count_ids(last.token_ids) != first.offset + count_ids(token_ids):
        return run
    return [
        Delta(
            last.stream,
            last.attempt,
            first.offset,
            token_ids,
            last.finish,
            last.stop_token,
            cached_tokens=first.cached_tokens,
            error=last.error,
            # a step that computes no drafts may not repeat the count
            drafts=next((each.drafts for each in reversed(run) if each.drafts), None),
        )
    ]


def _too_large(delta: Delta, error: PayloadTooLarge) -> Delta:
    """Return what a gateway gets instead of a delta that no message can hold: the stream's end."""
    return Delta(delta.stream, delta.attempt, delta.offset, b"", "error", error=to_failed(error))
