"""StateReader: reads from the parts of a gateway what the console's pages show."""

from collections import Counter
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Final

import tokenmesh
from tokenmesh.services.gateway.core.generation.usage import Meters
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.mesh.catalog import WORKER, Catalog
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.services.gateway.core.operations.console.shapes import (
    ConsoleState,
    Health,
    MeshState,
    ModelState,
    ProcessState,
    RequestProgress,
    RunningRequest,
    RunningRequests,
    TokenRates,
    WorkerState,
    connected_row,
    unconnected_row,
)
from tokenmesh.services.gateway.core.operations.open_requests import WINDOW_S, OpenRequests
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages.beat import WorkerLoad

_LATE_BEATS: Final = 2.5


@dataclass(slots=True)
class _Totals:
    """Sums over the processes of the mesh."""

    workers: int = 0
    workers_up: int = 0
    running: int = 0
    waiting: int = 0
    queued: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    streams_by_tenant: Counter[str] = field(default_factory=Counter)

    def add(self, member: Member) -> None:
        beat, load = member.beat, member.beat.load
        self.queued += beat.queued
        if beat.service != WORKER:
            return
        self.workers += 1
        self.workers_up += not beat.draining and member.takes_requests
        if load is not None:
            self.running += load.running
            self.waiting += load.waiting
            self.kv_blocks_used += load.kv_blocks_used
            self.kv_blocks_total += load.kv_blocks_total
            self.streams_by_tenant.update(load.tenant_streams)


@dataclass(slots=True)
class StateReader:
    """`sample` once per interval, then `read` for each kind of viewer.

    All loops yield to the event loop, so that many streams or processes do not hold it.
    """

    gateway_id: GatewayId
    members: Members
    catalog: Catalog
    streams: Streams
    requests: OpenRequests
    meters: Meters
    traces: TraceStore
    settings: GatewaySettings
    _rates: TokenRates = field(default_factory=TokenRates)
    _progress: dict[str, RequestProgress] = field(default_factory=dict)

    async def sample(self) -> None:
        """Read the counters of workers, and the progress of all streams."""
        await self._rates.sample(self.members.service(WORKER), monotonic_s())
        turns, progress = Turns(), dict[str, RequestProgress]()
        for stream in self.streams.all():
            request_id = stream.job.request_id
            found = progress.get(request_id)
            if found is None:
                found = progress[request_id] = RequestProgress(stream)
            found.add(stream)
            await turns.rest()
        self._progress = progress

    async def read(self, access: Access) -> ConsoleState:
        """Return what the owner of a key may see."""
        turns = Turns()
        return ConsoleState(
            gateway=self.gateway_id,
            version=tokenmesh.__version__,
            tenant=access.tenant.name,
            is_admin=access.is_admin,
            can_manage=access.is_admin and self.settings.admin_routes,
            models=self._models(),
            requests=await self._running(access, turns),
            mesh=await self._mesh(turns) if access.is_admin else None,
        )

    def _models(self) -> list[ModelState]:
        models = []
        for card in self.catalog.all()[: self.settings.max_console_rows]:
            tasks = [str(task) for task in card.tasks]
            drafts = card.draft_method, card.max_drafts
            facts = (card.max_model_len, card.generates, card.takes_images, tasks, *drafts)
            models.append(ModelState(card.name, *facts))
            adapters = self.catalog.adapters(card)[: self.settings.max_console_rows]
            models += [ModelState(each.name, *facts, parent=card.name) for each in adapters]
        return models

    async def _running(self, access: Access, turns: Turns) -> RunningRequests:
        now, rows, total = monotonic_s(), list[RunningRequest](), 0
        others = dict(self._progress)
        for context in self.requests.newest_first():
            await turns.rest()
            progress = others.pop(context.request_id, None)
            if not access.may_see(context.access.tenant.name):
                continue
            total += 1
            if len(rows) < self.settings.max_console_rows:
                rows.append(connected_row(context, progress, now))
        for progress in others.values():
            await turns.rest()
            if not access.may_see(progress.stream.job.tenant.name):
                continue
            total += 1
            if len(rows) < self.settings.max_console_rows:
                rows.append(unconnected_row(progress))
        return RunningRequests(total, rows)

    async def _mesh(self, turns: Turns) -> MeshState:
        now, most = monotonic_s(), self.settings.max_console_rows
        members, totals = self.members.all(), _Totals()
        for member in members:
            totals.add(member)
            await turns.rest()
        shown = []
        for member in nsmallest(most, members, key=_order):
            shown.append(_process(member, now))
            await turns.rest()
        return MeshState(
            health=self._health(totals, now),
            num_processes=len(members),
            processes=shown,
            other_protocols=[beat.instance_id for beat in self.members.foreign.all(now)[:most]],
            tenant_streams=dict(totals.streams_by_tenant.most_common(most)),
            num_spans=self.traces.num_received,
        )

    def _health(self, totals: "_Totals", now: float) -> Health:
        rates = self._rates.per_second() or (None, None, None)
        ended = self.requests.outcomes(now)
        times = sorted(s for at, s in self.meters.first_tokens if now - at <= WINDOW_S)
        return Health(
            workers=totals.workers,
            workers_up=totals.workers_up,
            streams=totals.running,
            waiting=totals.waiting,
            queued=totals.queued,
            kv_used=round(totals.kv_blocks_used / max(1, totals.kv_blocks_total), 4),
            tokens_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            cached_tokens_per_s=rates[2],
            requests=ended.requests,
            errors=ended.errors,
            refused=ended.refused,
            ttft_p50_s=_percentile(times, 0.5),
            ttft_p95_s=_percentile(times, 0.95),
        )


def _order(member: Member) -> tuple[str, str]:
    return member.beat.service, member.beat.instance_id


def _process(member: Member, now: float) -> ProcessState:
    beat = member.beat
    return ProcessState(
        id=beat.instance_id,
        service=beat.service,
        version=beat.version,
        draining=beat.draining,
        late=now - member.last_seen > _LATE_BEATS * beat.interval_s,
        queued=beat.queued,
        models=[card.name for card in beat.models],
        kv_role=next((card.kv_role for card in beat.models), ""),
        kv_tiers=next((card.kv_tiers for card in beat.models), []),
        load=None if beat.load is None else _worker(beat.load),
    )


def _worker(load: WorkerLoad) -> WorkerState:
    return WorkerState(
        running=load.running,
        waiting=load.waiting,
        max_num_seqs=load.max_num_seqs,
        queued_tokens=load.queued_tokens,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        prefill_tokens_per_s=round(load.prefill_tokens_per_s),
        step_s=round(load.step_s, 4),
        preemptions=load.preemptions,
        prefill_tokens=load.prefill_tokens,
        decode_tokens=load.decode_tokens,
        cached_tokens=load.cached_tokens,
        sleep_level=load.sleep_level,
        kv_leases=load.kv_leases,
    )


def _percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
