"""The NATS micro protocol, so that `nats micro list`, `info` and `stats` see the mesh.

One endpoint an actor; its metadata lists every subject that the actor listens on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

import tokenmesh
from tokenmesh.shared import subjects
from tokenmesh.shared.actor.meters import ActorCounts
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.ids import InstanceId

_TYPE: Final = "io.nats.micro.v1.{}_response"
_NS: Final = 1_000_000_000


class Endpoint(Protocol):
    """The part of an actor that the protocol reports; `ActorRuntime` has it."""

    @property
    def name(self) -> str:
        """Class name of the actor."""

    @property
    def counts(self) -> ActorCounts: ...

    @property
    def listening(self) -> Sequence[tuple[str, str | None]]:
        """Its subjects and their queue groups."""


@dataclass(frozen=True, slots=True)
class Micro:
    """One process of the mesh as the micro protocol describes it."""

    service: str
    instance_id: InstanceId
    epoch: int
    endpoints: Callable[[], Sequence[Endpoint]]
    started: str

    @classmethod
    def of(
        cls,
        service: str,
        instance_id: InstanceId,
        epoch: int,
        endpoints: Callable[[], Sequence[Endpoint]],
    ) -> "Micro":
        """A process that starts now."""
        started = datetime.fromtimestamp(wall_s(), UTC).isoformat().replace("+00:00", "Z")
        return cls(f"tokenmesh-{service}", instance_id, epoch, endpoints, started)

    async def listen(self, bus: Bus) -> None:
        """Answer on all nine subjects."""
        answers = {"PING": self.ping, "INFO": self.info, "STATS": self.stats}
        for verb, answer in answers.items():
            await bus.answer_raw(subjects.micro(verb), answer)
            await bus.answer_raw(subjects.micro(verb, self.service), answer)
            await bus.answer_raw(subjects.micro(verb, self.service, self.instance_id), answer)

    def ping(self) -> bytes:
        """The answer to $SRV.PING."""
        return msgspec.json.encode(self._identity("ping"))

    def info(self) -> bytes:
        """The answer to $SRV.INFO."""
        endpoints = [_describe(endpoint) for endpoint in self.endpoints()]
        description = f"TokenMesh {self.service.removeprefix('tokenmesh-')}"
        info = {"description": description, "endpoints": endpoints}
        return msgspec.json.encode(self._identity("info") | info)

    def stats(self) -> bytes:
        """The answer to $SRV.STATS."""
        endpoints = [_describe(each) | _count(each.counts) for each in self.endpoints()]
        return msgspec.json.encode(
            self._identity("stats") | {"started": self.started, "endpoints": endpoints}
        )

    def _identity(self, kind: str) -> dict[str, object]:
        return {
            "type": _TYPE.format(kind),
            "name": self.service,
            "id": self.instance_id,
            "version": tokenmesh.__version__,
            "metadata": {"epoch": str(self.epoch)},
        }


def _describe(endpoint: Endpoint) -> dict[str, object]:
    listening = endpoint.listening
    subject, queue = listening[0] if listening else ("", None)
    return {
        "name": endpoint.name,
        "subject": subject,
        "queue_group": queue or "",
        "metadata": {"subjects": " ".join(each for each, _ in listening)},
    }


def _count(counts: ActorCounts) -> dict[str, object]:
    busy_ns = int(counts.busy_s * _NS)
    return {
        "num_requests": counts.received,
        "num_errors": counts.failed,
        "last_error": counts.last_error,
        "processing_time": busy_ns,
        "average_processing_time": busy_ns // counts.received if counts.received else 0,
    }
