"""Intake: whether the worker takes a request now, of either kind."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.worker_svc.streams import WorkerStream, WorkerStreams
from tokenmesh.shared.errors import Draining, UnknownModel
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages import Generate, Pool, Refused


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of this worker in the mesh."""

    worker_id: WorkerId
    epoch: int
    names: tuple[ModelName, ...]
    """The model's name and aliases."""


class Intake:
    """Checks the requests of one worker before they are read."""

    def __init__(
        self,
        identity: Identity,
        streams: WorkerStreams,
        asleep: Callable[[float | None], Refused | None],
        end: Callable[[WorkerStream], None],
    ) -> None:
        """asleep: why no stream is taken while the worker sleeps, else it gets the keep-alive of
        the request. end: cancels a stream."""
        self._identity = identity
        self._streams = streams
        self._asleep = asleep
        self._end = end
        self.is_draining = False
        """Nothing new is taken."""

    def check_source(self, message: Generate, *, computes: bool) -> Refused | None:
        """Why no KV is kept for the reader of this request; None: it is.

        One that drains still has what it has. Raises UnknownModel.
        """
        if message.epoch != self._identity.epoch:
            return Refused(reason="the worker has restarted: its epoch differs", retry_after_s=0.0)
        if self.is_draining and computes:
            return Refused(reason="the worker is draining", retry_after_s=0.0)
        if message.model not in self._identity.names:
            raise UnknownModel(f"this worker serves {self._identity.names[0]}", param="model")
        return self._asleep(message.keep_alive_s)

    def check(self, message: Generate | Pool) -> WorkerStream | Refused | None:
        """None: take it; a stream that is this very attempt; or why it is not taken now.

        An earlier attempt is ended. Raises Draining, also while a worker on demand sleeps, and
        UnknownModel.
        """
        if message.epoch != self._identity.epoch:
            return Refused(reason="the worker has restarted: its epoch differs", retry_after_s=0.0)
        known = self._streams.get(message.gateway, message.stream)
        if known is not None and message.attempt == known.key.attempt:
            return known
        if known is not None and message.attempt < known.key.attempt:
            return Refused(reason=f"attempt {known.key.attempt} is here", retry_after_s=0.0)
        if known is not None:
            self._end(known)
        if self.is_draining:
            # not Refused: a client should not retry here later
            raise Draining("the worker is draining")
        if message.model not in self._identity.names:
            raise UnknownModel(f"this worker serves {self._identity.names[0]}", param="model")
        return self._asleep(message.keep_alive_s)
