"""Runs: the responses that this gateway is generating, begun here or adopted."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from tokenmesh.services.gateway.apis.responses.event_log import EventLog, Replay, tokens_of
from tokenmesh.services.gateway.apis.responses.feed import Feed
from tokenmesh.services.gateway.apis.responses.log_writer import LateWriter, LogWriter, NoWriter
from tokenmesh.services.gateway.apis.responses.records import Adopted, ResponseBegun, ResponseEnded
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.apis.responses.response_plan import ResponsePlan, ResponseSpec
from tokenmesh.services.gateway.apis.responses.response_run import ResponseRun, RunContext
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, Draining, Overloaded, TokenMeshError
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import response_log

logger = logging.getLogger(__name__)

_RETRY_AFTER_S: Final = 1.0


class OrphanCleaner:
    """Deletes responses whose log may have entries although their request has failed.

    An append that was not acknowledged may have happened. Its client got an error, so a gateway
    that adopted the response would generate and charge it a second time.
    """

    def __init__(self, logs: ResponseLogs) -> None:
        self._logs = logs
        self._ids: set[ResponseId] = set()
        self._deleting: asyncio.Task[None] | None = None
        self._is_stopped = False

    def __contains__(self, response_id: ResponseId) -> bool:
        return response_id in self._ids

    def add(self, response_id: ResponseId) -> None:
        """Delete a response as soon as possible; ignored above `max_running` of them."""
        if self._is_stopped or len(self._ids) >= self._logs.settings.max_running:
            return
        self._ids.add(response_id)
        if self._deleting is None or self._deleting.done():
            self._deleting = asyncio.create_task(self._delete())

    async def stop(self) -> None:
        self._is_stopped = True
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.gather(self._deleting, return_exceptions=True)

    async def _delete(self) -> None:
        while self._ids:
            response_id = next(iter(self._ids))
            try:
                await self._logs.delete(response_id)
            except TokenMeshError as error:
                logger.debug("cannot delete response %s yet: %s", response_id, error.message)
                await asyncio.sleep(self._logs.settings.adopt_interval_s)
            else:
                self._ids.discard(response_id)


class Runs:
    """Each run is a task, so it does not end with its client's connection."""

    def __init__(
        self,
        owner: GatewayId,
        logs: ResponseLogs | None,
        context: RunContext,
        settings: ResponseSettings,
        metrics: Metrics,
    ) -> None:
        """`logs` None: only `begin_unstored` may be called."""
        self.owner = owner
        self._stored_logs = logs
        self._orphans = OrphanCleaner(logs) if logs is not None else None
        self._context = context
        self._settings = settings
        self._metrics = metrics
        self._run_by_id: dict[ResponseId, ResponseRun | None] = {}
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.gauge_of("responses_running", lambda: len(self._run_by_id))

    @property
    def _logs(self) -> ResponseLogs:
        assert self._stored_logs is not None, "responses are not stored here"
        return self._stored_logs

    def __contains__(self, response_id: ResponseId) -> bool:
        """Return whether it is generated here or about to be deleted, so that nothing may
        adopt it.
        """
        is_orphan = self._orphans is not None and response_id in self._orphans
        return is_orphan or response_id in self._run_by_id

    def cancel(self, response_id: ResponseId) -> None:
        """End a run as cancelled, if it is here."""
        run = self._run_by_id.get(response_id)
        if run is not None:
            run.cancel()

    async def stop(self) -> None:
        """Stop all runs, so that other gateways adopt them, and refuse new ones."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._orphans is not None:
            await self._orphans.stop()

    async def begin(self, plan: ResponsePlan) -> Feed:
        """Run a response that is stored event by event. Raises Overloaded, Unavailable."""
        spec, feed = plan.spec, self._new_feed()
        writer = self._log_writer(spec, feed)
        with self._reserve(spec.id):
            try:
                await self._logs.marks.set(self.owner, spec.id)
                await writer.put(_begun(plan, self.owner))
                await writer.settle()
            except BaseException:
                self._delete_later(spec.id)
                raise
        self._start(plan, Replay(writer), feed, is_stored=True)
        return feed

    def begin_late(self, plan: ResponsePlan) -> Feed:
        """Run a response that is stored when it has ended. Raises Overloaded."""
        feed = self._new_feed()
        log = self._log_writer(plan.spec, Feed(0))

        def lost(error: TokenMeshError) -> None:
            plan.spec.context.warnings.append(f"not stored: {error.message}")
            self._delete_later(plan.spec.id)

        writer = LateWriter(log, _begun(plan, self.owner), feed.push, lost)
        with self._reserve(plan.spec.id):
            self._start(plan, Replay(writer), feed)
        return feed

    def _delete_later(self, response_id: ResponseId) -> None:
        if self._orphans is not None:
            self._orphans.add(response_id)

    def begin_unstored(self, plan: ResponsePlan) -> Feed:
        """Run a response that is not stored. Raises Overloaded."""
        feed = self._new_feed()
        with self._reserve(plan.spec.id):
            self._start(plan, Replay(NoWriter(feed.push)), feed)
        return feed

    async def adopt(self, plan: ResponsePlan, log: EventLog, reason: str) -> None:
        """Continue a response whose gateway is dead. Raises Conflict if another one does."""
        spec, feed = plan.spec, self._new_feed()
        feed.leave()
        writer = self._log_writer(spec, feed, log)
        with self._reserve(spec.id):
            await self._logs.marks.set(self.owner, spec.id)
            await writer.put(Adopted(owner=self.owner, reason=reason))
            await writer.settle()
        self._metrics.counter("responses_adopted", reason=reason).inc()
        logger.warning("continuing response %s: %s", spec.id, reason)
        self._start(plan, Replay(writer, log), feed, is_stored=True)

    def _new_feed(self) -> Feed:
        return Feed(self._settings.max_feed_bytes)

    def _log_writer(self, spec: ResponseSpec, feed: Feed, log: EventLog | None = None) -> LogWriter:
        log, key = log or EventLog(), response_log(spec.id)
        tenant = spec.context.access.tenant.name
        return LogWriter(
            self._logs.journal,
            key,
            self._settings,
            feed.push,
            after=log.last,
            num_bytes=log.num_bytes,
            count=partial(self._logs.shares.count, tenant, key),
        )

    @contextmanager
    def _reserve(self, response_id: ResponseId) -> Iterator[None]:
        """Count a run that is about to start; undone if the block raises."""
        if self._is_stopped:
            raise Draining("this gateway is draining")
        limit = self._settings.max_running
        if len(self._run_by_id) >= limit:
            raise Overloaded(
                f"this gateway is already running {limit} responses", retry_after_s=_RETRY_AFTER_S
            )
        self._run_by_id[response_id] = None
        try:
            yield
        except BaseException:
            del self._run_by_id[response_id]
            raise

    def _start(
        self, plan: ResponsePlan, replay: Replay, feed: Feed, *, is_stored: bool = False
    ) -> None:
        response_id = plan.spec.id
        model = plan.first.generation.head.model
        meter = self._context.services.meters.start(model, plan.spec.context)
        run = ResponseRun(plan, replay, self._context, meter, is_marked=is_stored)
        self._run_by_id[response_id] = run
        task = asyncio.create_task(self._run(response_id, run, feed, is_stored))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, response_id: ResponseId, run: ResponseRun, feed: Feed, is_stored: bool
    ) -> None:
        error: TokenMeshError | None = None
        try:
            await run.run()
        except TokenMeshError as problem:
            logger.info("response %s ends: %s", response_id, problem.message)
            error = problem
        except Exception:
            logger.exception("response %s crashed", response_id)
            error = TokenMeshError("internal error")
        finally:
            feed.close(error or run.failure)
            run.release()
            del self._run_by_id[response_id]
        outcome = feed.ended.status if feed.ended is not None else type(error).__name__
        self._metrics.counter("responses_made", outcome=outcome).inc()
        if is_stored:
            await self._clean_up(response_id, run, error)

    async def _clean_up(
        self, response_id: ResponseId, run: ResponseRun, error: TokenMeshError | None
    ) -> None:
        """Remove the mark, unless another gateway may succeed in continuing the response."""
        try:
            if error is None or isinstance(error, Conflict):
                # Ended, adopted by another gateway, or deleted. The usage is charged before the
                # mark is removed: a gateway that finds the mark of an ended response charges it.
                if error is not None and not (await self._logs.read(response_id)).records:
                    # Deleted by its client, which still pays for what was generated.
                    run.charge()
                await self._context.services.admission.wait_charged(response_id)
                await self._logs.marks.remove(self.owner, response_id)
            elif not run.has_events and not (await self._logs.read(response_id)).frames:
                # Its only client got the error.
                await self._logs.delete(response_id)
            elif not error.retryable:
                await self.give_up(response_id, error)
        except TokenMeshError as problem:
            logger.warning("cannot unmark response %s: %s", response_id, problem.message)

    async def close(self, begun: ResponseBegun, ended: ResponseEnded, tenant: Tenant) -> None:
        """Charge an ended response if its gateway has not. Raises as `Admission.settle`."""
        tokens = tokens_of(ended)
        if tokens is not None:
            admission = self._context.services.admission
            await admission.charge_for_another(tenant, begun.model, tokens, begun.id)

    def is_closing(self, response_id: ResponseId) -> bool:
        """Return whether a response has ended here and its usage is not in Redis yet."""
        return self._context.services.admission.is_charge_pending(response_id)

    async def give_up(self, response_id: ResponseId, error: TokenMeshError) -> None:
        """Record that a response has failed. Raises Conflict if its log has changed."""
        log = await self._logs.read(response_id)
        if log.begun is not None and log.ended is None:
            await self._logs.append(response_id, log.failed(error), log)
        await self._logs.marks.remove(self.owner, response_id)


def _begun(plan: ResponsePlan, owner: GatewayId) -> ResponseBegun:
    spec = plan.spec
    assert spec.seed is not None, "a plan has a seed"
    return ResponseBegun(
        id=spec.id,
        owner=owner,
        model=ModelName(plan.first.generation.head.model),
        body=spec.body_json,
        created_s=spec.created_s,
        deadline_s=spec.deadline_s,
        seed=spec.seed,
        is_background=spec.is_background,
        tenant=spec.context.access.tenant.name,
        history_items=len(spec.previous) if spec.body.conversation is not None else 0,
    )
