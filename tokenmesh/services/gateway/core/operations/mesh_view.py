"""The mesh as one gateway sees it: every process by its last heartbeat, and draining one of them.

Metrics of workers are in the gateway's /metrics, their load is also a response header (Envoy's
ORCA). The load comes from heartbeats, everything else is requested at a scrape. Dead workers are
left out.
"""

import asyncio
import difflib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

import tokenmesh
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.answer import LOAD_FORMAT
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Forbidden, NotFound, TokenMeshError
from tokenmesh.shared.ids import GatewayId, InstanceId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Drain, Heartbeat, MetricsRead, ReadMetrics
from tokenmesh.shared.messages.beat import PROTOCOL, WorkerLoad
from tokenmesh.shared.metrics import ENGINE_METRICS, Metrics, Sample, join_samples
from tokenmesh.shared.services import SERVICES
from tokenmesh.shared.subjects import process_control

logger = logging.getLogger(__name__)

MAX_METRICS_BYTES: Final = 1024 * 1024
"""Size of one such answer; a larger one is ignored."""


@dataclass(slots=True)
class MeshView:
    """The mesh as one gateway sees it."""

    gateway_id: GatewayId
    bus: Bus
    members: Members
    settings: GatewaySettings

    def state(self) -> dict[str, Any]:
        """As JSON values; processes sorted by service and id."""
        now = monotonic_s()
        members = sorted(
            self.members.all(), key=lambda each: (each.beat.service, each.beat.instance_id)
        )
        foreign = [_identity(beat) for beat in self.members.foreign.all(now)]
        return {
            "gateway": self.gateway_id,
            "version": tokenmesh.__version__,
            "protocol": PROTOCOL,
            "processes": [_process(member, now) for member in members],
            "starting": [_identity(each.beat) for each in self._starting()],
            "other_protocols": foreign,
        }

    def _starting(self) -> list[Member]:
        return [each for spec in SERVICES for each in self.members.starting(spec.name)]

    async def drain(self, instance_id: str) -> None:
        """Send Drain to a process and wait for its answer.

        Raises Forbidden without `gateway.admin_routes`, NotFound for an unknown id.
        """
        if not self.settings.admin_routes:
            raise Forbidden("the gateway was started without --enable-admin-routes", param="id")
        member = self.members.get(InstanceId(instance_id))
        if member is None:
            raise NotFound(self._not_found(instance_id), param="id")
        if member.beat.draining:
            return
        logger.info("draining %s", instance_id)
        deadline_s = now_s() + self.settings.drain_timeout_s
        subject = process_control(member.beat.instance_id)
        await self.bus.request(subject, Drain(), deadline_s=deadline_s)

    def _not_found(self, instance_id: str) -> str:
        known = [member.beat.instance_id for member in self.members.all()]
        near = difflib.get_close_matches(instance_id, known, n=3, cutoff=0.5) or sorted(known)[:8]
        return f"no process {instance_id[:64]!r} in the mesh; known: {', '.join(near)}"


def _identity(beat: Heartbeat) -> dict[str, Any]:
    return {
        "id": beat.instance_id,
        "service": beat.service,
        "version": beat.version,
        "protocol": beat.protocol,
        # A string: it exceeds JavaScript's integers.
        "epoch": str(beat.epoch),
    }


def _process(member: Member, now: float) -> dict[str, Any]:
    beat = member.beat
    return {
        **_identity(beat),
        "draining": beat.draining,
        "last_beat_s": round(now - member.last_seen, 3),
        "queued": beat.queued,
        "models": [card.name for card in beat.models],
        "ranks": max((card.ranks for card in beat.models), default=1),
        "stages": max((card.stages for card in beat.models), default=1),
        "kv_role": next((card.kv_role for card in beat.models), ""),
        "kv_tiers": next((card.kv_tiers for card in beat.models), []),
        "load": None if beat.load is None else msgspec.structs.asdict(beat.load),
    }


_HEADER: Final = b"endpoint-load-metrics"

Headers = list[tuple[bytes, bytes]]


def load_header(context: RequestContext, workers: Sequence[Member]) -> Headers:
    """The response header, as TEXT or JSON as the request wants; empty if no load is known."""
    kind = context.headers[LOAD_FORMAT].upper()
    if kind not in (b"TEXT", b"JSON"):
        context.warnings.append("endpoint-load-metrics-format must be TEXT or JSON")
        return []
    metrics = _metrics(workers)
    if not metrics:
        return []
    if kind == b"JSON":
        return [(_HEADER, b"JSON " + encode_json({"named_metrics": metrics}))]
    pairs = (f"named_metrics.{name}={value:g}" for name, value in metrics.items())
    return [(_HEADER, b"TEXT " + ", ".join(pairs).encode())]


def _metrics(workers: Sequence[Member]) -> dict[str, float]:
    """vLLM's two metrics, over all workers."""
    loads = [member.beat.load for member in workers if member.beat.load is not None]
    if not loads:
        return {}
    num_blocks = sum(load.kv_blocks_total for load in loads)
    return {
        "kv_cache_usage_perc": sum(load.kv_blocks_used for load in loads) / max(1, num_blocks),
        "num_requests_waiting": float(sum(load.waiting for load in loads)),
    }


_READ_BY_NAME: Final[dict[str, Callable[[WorkerLoad], float]]] = {
    "worker_requests_running": lambda load: load.running,
    "worker_requests_waiting": lambda load: load.waiting,
    "worker_kv_cache_usage_perc": lambda load: load.kv_blocks_used / max(1, load.kv_blocks_total),
    "worker_sleep_level": lambda load: load.sleep_level,
    "worker_preemptions": lambda load: load.preemptions,
    "worker_prefill_tokens": lambda load: load.prefill_tokens,
    "worker_decode_tokens": lambda load: load.decode_tokens,
}


def measure_workers(
    metrics: Metrics, workers: Callable[[], list[Member]], max_workers: int
) -> None:
    """Add the load of at most `max_workers` workers, those with the smallest ids."""

    def read() -> Iterator[Sample]:
        members = sorted(workers(), key=lambda each: each.beat.instance_id)
        for member in members[:max_workers]:
            load, models = member.beat.load, member.beat.models
            if load is None or not models:
                continue
            labels = {"model_name": models[0].name, "engine": member.beat.instance_id}
            for name, value_of in _READ_BY_NAME.items():
                yield Sample(name, labels, value_of(load))

    metrics.watch(tuple(_READ_BY_NAME), read)


@dataclass(slots=True)
class EngineMetrics:
    """Metrics of the engines of workers and encoders, under vLLM's names."""

    bus: Bus
    members: Callable[[], list[Member]]
    settings: GatewaySettings
    _lines: dict[InstanceId, dict[str, bytes]] = field(default_factory=dict)
    """The last answer of each live process."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _read_at_s: float = float("-inf")

    async def read(self) -> None:
        """Read them for a scrape; a process that does not answer in time keeps its last values."""
        async with self._reading:
            # Concurrent scrapes share one reading.
            if monotonic_s() - self._read_at_s >= self.settings.metrics_interval_s:
                await self._read_all()
                self._read_at_s = monotonic_s()

    def render(self, prefix: str, is_open: bool) -> bytes:
        """Return what was read, as text; `is_open`: in OpenMetrics."""
        return join_samples(ENGINE_METRICS, self._lines.values(), prefix, is_open)

    async def _read_all(self) -> None:
        ids = sorted(member.beat.instance_id for member in self.members())
        ids = ids[: self.settings.max_metric_workers]
        answers = await asyncio.gather(*(self._read(each) for each in ids))
        known = self._lines
        self._lines = {
            each: known.get(each, {}) if lines is None else lines
            for each, lines in zip(ids, answers, strict=True)
        }

    async def _read(self, instance: InstanceId) -> dict[str, bytes] | None:
        deadline_s = now_s() + self.settings.metrics_wait_s
        try:
            answer = await self.bus.request(
                process_control(instance), ReadMetrics(), deadline_s=deadline_s
            )
        except TokenMeshError:
            return None
        if not isinstance(answer, MetricsRead):
            return None
        num_bytes = sum(map(len, answer.lines.values()))
        return answer.lines if num_bytes <= MAX_METRICS_BYTES else None
