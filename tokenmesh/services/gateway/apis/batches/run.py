"""BatchRun: works on one batch from the state in its log to its end.

LineRunner runs one line of it as a request of its tenant, until that has an answer.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.types import Scope

from tokenmesh.services.gateway.apis.batches.lines import (
    BadLine,
    InputLine,
    LineChecker,
    LineRequest,
    answered,
    not_run,
    split_lines,
)
from tokenmesh.services.gateway.apis.batches.logs import BatchLogWriter
from tokenmesh.services.gateway.apis.batches.output_files import OutputFiles
from tokenmesh.services.gateway.apis.batches.records import BatchBegun, BatchProblem, Ending
from tokenmesh.services.gateway.core.context import RequestContext, attach
from tokenmesh.services.gateway.core.files.uploads import Uploads
from tokenmesh.services.gateway.core.http.local_call import LocalCalls, LocalResponse
from tokenmesh.services.gateway.core.tenancy.tenant import Access, Tenant
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.batches import BatchSettings
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import RequestId, new_request_id
from tokenmesh.shared.journal import StoreFull
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT, span

_MAX_LINES: Final = 50_000
"""A batch has at most so many requests."""

RETRY_MAX_S: Final = 30.0
"""Longest pause before a request is tried again."""

_WAIT: Final = (429, 503)
"""The mesh is full or not there, or the tenant is over a limit: later it may succeed."""
_AGAIN: Final = (499, 500, 504)
_FIRST_PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class LineRunner:
    """All lines of one batch."""

    calls: LocalCalls
    begun: BatchBegun
    access: Access
    """The tenant's, with requests behind all others."""
    settings: BatchSettings

    async def run(self, request: LineRequest, request_id: str) -> LocalResponse:
        """The last response: one that waiting cannot change."""
        failures, pause_s = 0, _FIRST_PAUSE_S
        while True:
            response = await self._post(request, request_id)
            if response.status in _AGAIN:
                failures += 1
            if response.status not in (*_WAIT, *_AGAIN) or failures >= self.settings.attempts:
                return response
            wanted_s = max(pause_s, response.retry_after_s or 0.0)
            await asyncio.sleep(min(wanted_s, RETRY_MAX_S))
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _post(self, request: LineRequest, request_id: str) -> LocalResponse:
        def attach_context(scope: Scope) -> None:
            context = RequestContext(
                RequestId(request_id),
                True,
                monotonic_s(),
                self.access,
                headers=dict(scope["headers"]),
            )
            attach(scope, context)

        attributes: dict[str, str | int] = {
            REQUEST_ID: request_id,
            TENANT: self.access.tenant.name,
            "url.path": self.begun.endpoint,
            "tokenmesh.batch": self.begun.id,
        }
        with span("batch line", attributes) as current:
            response = await self.calls.post(self.begun.endpoint, request.body, attach_context)
            current.set_attribute("http.response.status_code", response.status)
        return response


logger = logging.getLogger(__name__)

_EXPIRED: Final = "This request could not be executed before the completion window expired."
_ERRORS_SHARE: Final = 4
"""The errors of a batch may have this part of what its answers may have."""

Checked = tuple[InputLine, LineRequest | BadLine]


class BatchRun:
    """`run` is called once. Cancelled, it leaves the batch to another gateway."""

    def __init__(
        self,
        writer: BatchLogWriter,
        uploads: Uploads,
        calls: LocalCalls,
        tenant: Tenant,
        metrics: Metrics,
    ) -> None:
        self._writer = writer
        self._begun = writer.begun
        self._logs = writer.logs
        self._settings = settings = writer.logs.settings
        self._uploads = uploads
        low = replace(tenant, priority=tenant.priority + settings.priority)
        self._runner = LineRunner(calls, writer.begun, Access(low), settings)
        self._tenant = tenant
        self._metrics = metrics
        self._files = OutputFiles(writer, uploads, tenant)
        self._is_cancelled = False
        self._work: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """End the batch as cancelled, with the answers that it has."""
        self._is_cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Return when the batch has ended. Raises Conflict, and what the journal raises."""
        ending = self._writer.state.ending or await self._execute()
        await self._files.finish(ending)
        await self._logs.close(self._begun.id, self._writer.owner)
        self._metrics.counter("batches_ended", status=self._writer.state.status).inc()

    async def _execute(self) -> Ending:
        """Validate the input and run its lines; how that ended."""
        if self._is_cancelled or await self._logs.is_cancelled(self._begun.id):
            return "cancelled"
        self._work = asyncio.create_task(self._validate_and_work())
        try:
            async with asyncio.timeout(self._begun.expires_s - wall_s()):
                return await asyncio.shield(self._work)
        except TimeoutError:
            await self._stop_work()
            await self._expire_rest()
            return "expired"
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._is_cancelled or (current is not None and current.cancelling()):
                await self._stop_work()
                raise
            return "cancelled"

    async def _stop_work(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _validate_and_work(self) -> Ending:
        problem: BatchProblem | None = None
        try:
            if self._writer.state.status == "validating":
                problem = await self._validate()
            if problem is None:
                await self._run_lines()
        except* NotFound:
            # The input was deleted, or has expired.
            text = f"the file {self._begun.input_file_id} does not exist any more"
            problem = BatchProblem(code="file_not_found", message=text, param="input_file_id")
        except* StoreFull as errors:
            problem = _no_room(errors)
        if problem is None:
            return "completed"
        await self._save(problems=[problem])
        return "failed"

    async def _validate(self) -> BatchProblem | None:
        """Count the lines. A file without a single request fails the batch."""
        total = requests = 0
        first: tuple[int, BadLine] | None = None
        async with aclosing(self._lines()) as lines:
            async for line, found in lines:
                total += 1
                if total > _MAX_LINES:
                    text = f"the file has more than {_MAX_LINES} lines"
                    return BatchProblem(code="too_many_requests", message=text)
                if isinstance(found, LineRequest):
                    requests += 1
                elif first is None:
                    first = line.index + 1, found
        if first is not None and not requests:
            number, bad = first
            return BatchProblem(code=bad.code, message=bad.message, line=number)
        if not total:
            return BatchProblem(code="empty_file", message="the file holds no requests")
        await self._save(status="in_progress", in_progress_s=wall_s(), total=total)
        return None

    async def _run_lines(self) -> None:
        done = await self._logs.answered(self._begun.id)
        slots = asyncio.Semaphore(self._concurrency())
        async with asyncio.TaskGroup() as group, aclosing(self._lines()) as lines:
            async for line, found in lines:
                if line.index in done:
                    continue
                await slots.acquire()
                group.create_task(self._answer(line, found, slots))

    def _concurrency(self) -> int:
        limit = self._settings.max_requests_running
        if self._tenant.max_concurrent is None:
            return limit
        return max(1, min(limit, self._tenant.max_concurrent // 2))

    async def _answer(
        self, line: InputLine, found: LineRequest | BadLine, slots: asyncio.Semaphore
    ) -> None:
        try:
            most = self._settings.max_output_bytes // _ERRORS_SHARE
            if self._writer.state.error_bytes > most:
                raise StoreFull(
                    f"the errors of the batch are over {most} bytes, "
                    "a quarter of what its answers may have"
                )
            if isinstance(found, LineRequest):
                await self._run_line(line, found)
            else:
                await self._put_error(line.index, found)
        finally:
            slots.release()

    async def _run_line(self, line: InputLine, request: LineRequest) -> None:
        room = self._files.max_bytes - self._writer.state.output_bytes
        if room <= 0:
            await self._put_error(line.index, self._too_large(request))
            return
        request_id = new_request_id("batch_req")
        response = await self._runner.run(request, request_id)
        answer = answered(line.index, request, request_id, response.status, response.body)
        if len(answer.data) > min(room, self._writer.max_line_bytes):
            await self._put_error(line.index, self._too_large(request))
            return
        outcome = "failed" if answer.is_error else "completed"
        self._metrics.counter("batch_requests", outcome=outcome).inc()
        await self._writer.put(answer, response.body)

    def _too_large(self, request: LineRequest) -> BadLine:
        text = f"the answers of the batch are over their limit of {self._files.max_bytes} bytes"
        return BadLine(request.custom_id, "output_too_large", text)

    async def _put_error(self, index: int, bad: BadLine) -> None:
        self._metrics.counter("batch_requests", outcome=bad.code).inc()
        await self._writer.put(not_run(index, bad, new_request_id("batch_req")))

    async def _expire_rest(self) -> None:
        """An error for each line that has no answer."""
        if self._writer.state.status == "validating":
            return
        done = await self._logs.answered(self._begun.id)
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._lines()) as lines:
                slots = asyncio.Semaphore(self._settings.max_requests_running)
                async for line, found in lines:
                    if line.index not in done:
                        bad = BadLine(found.custom_id, "batch_expired", _EXPIRED)
                        await slots.acquire()
                        group.create_task(self._answer(line, bad, slots))
        except* NotFound:
            logger.info("the input of the expired batch %s has expired, too", self._begun.id)
        except* StoreFull as errors:
            await self._save(problems=[*self._writer.state.problems, _no_room(errors)])

    async def _lines(self) -> AsyncGenerator[Checked, None]:
        access = Access(self._tenant)
        file = await self._uploads.get(self._begun.input_file_id, access)
        limit = self._settings.max_line_bytes
        checker = LineChecker(self._begun.endpoint, limit)
        async with (
            aclosing(self._uploads.content(file)) as chunks,
            aclosing(split_lines(chunks, limit)) as lines,
        ):
            async for line in lines:
                yield line, checker.check(line)

    async def _save(self, **changes: Any) -> None:
        state = copy(self._writer.state)
        for name, value in changes.items():
            setattr(state, name, value)
        await self._writer.save(state)


def _no_room(errors: ExceptionGroup[StoreFull]) -> BatchProblem:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return BatchProblem(code="storage_full", message=str(error))
