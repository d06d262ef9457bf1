"""BatchService: creates, reads and cancels batches, on any gateway. BatchRunner: works on them."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.apis.batches.logs import (
    BatchLogs,
    BatchLogWriter,
    log_key,
    new_batch_id,
    tenant_token,
    token_of,
)
from tokenmesh.services.gateway.apis.batches.records import (
    BatchBegun,
    BatchList,
    BatchObject,
    BatchState,
    batch_object,
)
from tokenmesh.services.gateway.apis.batches.run import BatchRun
from tokenmesh.services.gateway.core.admitted import AdmittedRoutes
from tokenmesh.services.gateway.core.api import Background
from tokenmesh.services.gateway.core.files.uploads import FileObject
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.local_call import LocalCalls
from tokenmesh.services.gateway.core.mesh.ownership import OrphanWatch
from tokenmesh.services.gateway.core.tenancy.tenant import Access, Tenant
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.errors import Conflict, NotFound, Overloaded, TokenMeshError
from tokenmesh.shared.ids import GatewayId, InstanceId
from tokenmesh.shared.subjects import response_cancels

logger = logging.getLogger(__name__)

MAX_RUNNING_PER_TENANT: Final = 2
"""This is the most, of these, of one tenant; others wait in their order."""

_RETRY_AFTER_S: Final = 60.0
_POLL_S: Final = 0.05
_CANCEL_PREFIX: Final = b"batch_"
JOURNAL: Final = "batches"
"""Its name among those of a gateway."""


class BatchService:
    """It holds what the routes need; all state is in the logs."""

    def __init__(self, core: Core) -> None:
        """Without a journal there are no batches."""
        settings = core.config
        self.owner = core.id
        self.logs = BatchLogs(core.journals.get(JOURNAL), settings.batches)
        self.uploads = core.uploads
        self.settings = settings.batches
        self._beginning = asyncio.Lock()
        self._bus = core.bus
        self._file_ttl_s = settings.gateway.file_ttl_s
        self.creating: set[str] = set()
        """Batches whose mark may be there before their log."""

    async def create(
        self,
        file: FileObject,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        output_ttl_s: int | None,
        tenant: Tenant,
    ) -> BatchObject:
        """A new batch, which this gateway begins. Raises Overloaded."""
        begun = BatchBegun(
            id=new_batch_id(tenant.name),
            tenant=tenant.name,
            endpoint=endpoint,
            input_file_id=file.id,
            input_bytes=file.bytes,
            completion_window=window,
            created_s=wall_s(),
            # Without its input it could not go on.
            expires_s=min(wall_s() + self.settings.completion_window_s, file.expires_at),
            metadata=metadata,
            output_ttl_s=min(output_ttl_s or self._file_ttl_s, self._file_ttl_s),
        )
        journal, state = self.logs.journal, BatchState()
        writer = BatchLogWriter(self.logs, self.owner, begun, state, 0)
        self.creating.add(begun.id)
        try:
            await self._mark(tenant, begun.id)
            await writer.save(state, with_begun=True)
        except Overloaded:
            # Nothing was appended.
            raise
        except BaseException:
            # An append that was not acknowledged may have happened; its client got an error.
            with suppress(TokenMeshError):
                await journal.purge(log_key(begun.id))
            raise
        finally:
            self.creating.discard(begun.id)
        return batch_object(begun, state)

    async def _mark(self, tenant: Tenant, batch_id: str) -> None:
        """Mark a batch that this gateway will begin. Raises Overloaded where there is no room."""
        logs = self.logs
        assert logs.marks is not None, "a journal has marks"
        limit, token = self.settings.max_open_per_tenant, tenant_token(tenant.name)
        # One at a time: all of many at once would find room for one more.
        async with self._beginning:
            marked = {name for _, name in await logs.marks.all()}
            if sum(token_of(name) == token for name in marked) >= limit:
                text = f"the tenant {tenant.name} has {limit} batches that have not ended"
                raise Overloaded(text, retry_after_s=_RETRY_AFTER_S)
            if await logs.is_full():
                raise Overloaded("the disk for batches is full", retry_after_s=_RETRY_AFTER_S)
            await logs.drop_oldest(tenant.name, marked)
            await logs.marks.set(self.owner, batch_id)

    async def get(self, batch_id: str, access: Access) -> BatchObject:
        found = await self.logs.get(batch_id, access)
        return batch_object(found.begun, found.state)

    async def page(self, access: Access, limit: int, after: str | None) -> BatchList:
        """Batches of the caller's tenant, newest first. Raises NotFound for an unknown `after`."""
        ids = await self.logs.ids(access.tenant.name)
        if after is not None:
            if after not in ids:
                raise NotFound(f"after: {after[:80]!r} does not exist", param="after")
            ids = ids[ids.index(after) + 1 :]
        shown: list[BatchObject] = []
        for batch_id in ids:
            if len(shown) > limit:
                break
            found = await self.logs.find(batch_id)
            if found is not None and found.begun.tenant == access.tenant.name:
                shown.append(batch_object(found.begun, found.state))
        page = shown[:limit]
        return BatchList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(shown) > limit,
        )

    async def cancel(self, batch_id: str, access: Access) -> BatchObject:
        """Raises NotFound, and Conflict for a batch that has ended."""
        found = await self.logs.get(batch_id, access)
        if found.has_ended:
            text = f"Cannot cancel a batch with status '{found.state.status}'."
            raise Conflict(text, param="batch_id")
        await self.logs.request_cancel(batch_id)
        await self._bus.publish_raw(response_cancels(found.owner), batch_id.encode())
        give_up_s = monotonic_s() + self.settings.cancel_wait_s
        while found.state.cancelling_s is None and not found.has_ended:
            if monotonic_s() >= give_up_s:
                # Its owner is dead or slow; the request is durable.
                found.state.status, found.state.cancelling_s = "cancelling", wall_s()
                break
            await asyncio.sleep(_POLL_S)
            found = await self.logs.get(batch_id, access)
        return batch_object(found.begun, found.state)


class BatchRunner(Background):
    """The batches that this gateway works on; `run` must be running."""

    def __init__(self, service: BatchService, core: Core) -> None:
        self.service = service
        # Their requests count against limits like those of clients.
        app = AdmittedRoutes(_no_route, core, _none_is_exempt)
        self._calls = LocalCalls(app)
        self._members = core.members
        self._tenant_of = core.tenancy.keys.tenant
        times = core.config.service
        self._delay_s = times.missed_beats * times.beat_interval_s
        self._bus = core.bus
        metrics = core.metrics
        self._is_stopped = False
        self._metrics = metrics
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.gauge_of("batches_running", lambda: self.num_running)

    @property
    def num_running(self) -> int:
        """Batches that this gateway works on."""
        return len(self._runs)

    def _is_alive(self, owner: GatewayId) -> bool:
        return self._members.get(InstanceId(owner)) is not None

    async def run(self) -> None:
        """Begin and continue batches, until cancelled."""
        logs, settings = self.service.logs, self.service.settings
        if logs.marks is None:
            return
        watch = OrphanWatch(
            logs.marks,
            self.service.owner,
            self._adopt,
            is_alive=self._is_alive,
            is_here=lambda name: name in self._runs or name in self.service.creating,
            interval_s=settings.look_interval_s,
            what="batch",
        )
        subscription = await self._bus.subscribe_raw(
            response_cancels(self.service.owner), self._on_cancel
        )
        try:
            await watch.run(self._delay_s)
        finally:
            await subscription.stop()

    async def stop(self) -> None:
        """Stop all batches, so that other gateways continue them."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_cancel(self, _subject: str, data: bytes) -> None:
        if data.startswith(_CANCEL_PREFIX):
            run = self._runs.get(data.decode("ascii", "replace"))
            if run is not None:
                run.cancel()

    def _has_room(self, batch_id: str) -> bool:
        settings, token = self.service.settings, token_of(batch_id)
        of_tenant = sum(token_of(each) == token for each in self._runs)
        is_full = len(self._runs) >= settings.max_running
        return not (is_full or of_tenant >= MAX_RUNNING_PER_TENANT)

    async def _adopt(self, owner: GatewayId, batch_id: str) -> None:
        """Begin or continue a batch. Raises Conflict if another gateway does."""
        # Before its log is read: many may wait for a place.
        if self._is_stopped or not self._has_room(batch_id):
            return
        batches = self.service
        logs, marks = batches.logs, batches.logs.marks
        assert marks is not None, "a journal has marks"
        found = await logs.find(batch_id)
        if found is None or found.has_ended:
            await logs.close(batch_id, batches.owner)
            return
        if owner != batches.owner:
            if found.owner not in (owner, batches.owner) and self._is_alive(found.owner):
                await marks.remove(owner, batch_id)
                return
            logger.warning("continuing batch %s of %s", batch_id, owner)
            self._metrics.counter("batches_adopted").inc()
        await marks.set(batches.owner, batch_id)
        writer = BatchLogWriter(logs, batches.owner, found.begun, found.state, found.last)
        # This entry fences off the writer before.
        await writer.save(found.state)
        if owner != batches.owner:
            await marks.remove(owner, batch_id)
        tenant = self._tenant_of(found.begun.tenant)
        run = BatchRun(writer, batches.uploads, self._calls, tenant, self._metrics)
        self._runs[batch_id] = run
        task = asyncio.create_task(self._run(batch_id, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except* Conflict:
            # Another gateway has taken it over.
            marks = self.service.logs.marks
            with suppress(TokenMeshError):
                if marks is not None:
                    await marks.remove(self.service.owner, batch_id)
        except* TokenMeshError as errors:
            # The mark stays: the next look continues it.
            logger.warning("batch %s pauses: %s", batch_id, errors.exceptions[0])
        except* Exception:
            logger.exception("batch %s crashed", batch_id)
        finally:
            del self._runs[batch_id]


async def _no_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError(f"a batch has no endpoint {scope['path']}")


def _none_is_exempt(_method: str, _path: str) -> bool:
    return False
