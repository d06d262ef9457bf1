"""Runs: the responses that this gateway is making now, begun here or taken over."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tokenmesh.services.gateway.generation.metering import Meters
from tokenmesh.services.gateway.responses.closing import failed, tokens_of
from tokenmesh.services.gateway.responses.event_log import EventLog, Log
from tokenmesh.services.gateway.responses.feed import Feed
from tokenmesh.services.gateway.responses.log_writer import LateWriter, LogWriter, NoWriter
from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.responses.orphan_cleaner import OrphanCleaner
from tokenmesh.services.gateway.responses.records import (
    Adopted,
    Begun,
    Ended,
    encode_record,
    join_records,
)
from tokenmesh.services.gateway.responses.replay import Replay
from tokenmesh.services.gateway.responses.response_plan import ResponsePlan
from tokenmesh.services.gateway.responses.response_run import ResponseRun, RunContext
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, Draining, Overloaded, TokenMeshError
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import response_log

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class Runs:
    """Each run is a task of its own: that a client's connection ends does not end it."""

    def __init__(
        self,
        owner: GatewayId,
        logs: ResponseLogs | None,
        means: RunContext,
        settings: ResponseSettings,
        meters: Meters,
        metrics: Metrics,
    ) -> None:
        """`logs` None: only `begin_unkept` is ever called."""
        self.owner = owner
        self._kept = logs
        self._doubtful = OrphanCleaner(logs) if logs is not None else None
        self._means = means
        self._settings = settings
        self._meters = meters
        self._metrics = metrics
        self._run_by_id: dict[ResponseId, ResponseRun | None] = {}
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.gauge_of("responses_running", lambda: len(self._run_by_id))

    @property
    def _logs(self) -> ResponseLogs:
        assert self._kept is not None, "nothing is kept here"
        return self._kept

    def __contains__(self, response_id: ResponseId) -> bool:
        """Whether it is made here, or is to be forgotten: nobody's, then."""
        is_doubtful = self._doubtful is not None and response_id in self._doubtful
        return is_doubtful or response_id in self._run_by_id

    def cancel(self, response_id: ResponseId) -> None:
        """End a run with a record that says so, if there is one here."""
        run = self._run_by_id.get(response_id)
        if run is not None:
            run.cancel()

    async def stop(self) -> None:
        """Leave all runs to whoever takes them over, and begin no other."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._doubtful is not None:
            await self._doubtful.stop()

    async def begin(self, plan: ResponsePlan) -> Feed:
        """Make a response that is kept from its first event on. Raises Overloaded, Unavailable."""
        order, feed = plan.order, self._new_feed()
        writer = self._log_writer(order.id, feed)
        with self._room(order.id):
            try:
                await self._logs.mark(self.owner, order.id)
                await writer.put(_begun(plan, self.owner))
                await writer.settle()
            except BaseException:
                self._forget(order.id)
                raise
        self._start(plan, Replay(EventLog(), writer), feed, is_kept=True)
        return feed

    def begin_late(self, plan: ResponsePlan) -> Feed:
        """Make a response that is kept when it is whole. Raises Overloaded."""
        feed = self._new_feed()
        log = self._log_writer(plan.order.id, Feed(0))

        def lost(error: TokenMeshError) -> None:
            plan.order.exchange.warnings.append(f"not stored: {error.message}")
            self._forget(plan.order.id)

        writer = LateWriter(log, _begun(plan, self.owner), feed.push, lost)
        with self._room(plan.order.id):
            self._start(plan, Replay(EventLog(), writer), feed)
        return feed

    def _forget(self, response_id: ResponseId) -> None:
        if self._doubtful is not None:
            self._doubtful.add(response_id)

    def begin_unkept(self, plan: ResponsePlan) -> Feed:
        """Make a response that only its client sees. Raises Overloaded."""
        feed = self._new_feed()
        with self._room(plan.order.id):
            self._start(plan, Replay(EventLog(), NoWriter(feed.push)), feed)
        return feed

    async def adopt(self, plan: ResponsePlan, log: Log, reason: str) -> None:
        """Go on with a response whose owner is gone. Raises Conflict when another was faster."""
        order, feed = plan.order, self._new_feed()
        feed.leave()
        writer = self._log_writer(order.id, feed, log)
        with self._room(order.id):
            await self._logs.mark(self.owner, order.id)
            await writer.put(Adopted(owner=self.owner, reason=reason))
            await writer.settle()
        self._metrics.counter("responses_adopted", reason=reason).inc()
        logger.warning("going on with %s: %s", order.id, reason)
        self._start(plan, Replay(EventLog(log), writer), feed, is_kept=True)

    def _new_feed(self) -> Feed:
        return Feed(self._settings.max_feed_bytes)

    def _log_writer(self, response_id: ResponseId, feed: Feed, log: Log | None = None) -> LogWriter:
        log = log or Log()
        return LogWriter(
            self._logs.journal,
            response_log(response_id),
            self._settings,
            feed.push,
            after=log.last,
            num_bytes=log.num_bytes,
        )

    @contextmanager
    def _room(self, response_id: ResponseId) -> Iterator[None]:
        """The place of a run that is about to start, given up again when it cannot."""
        if self._is_stopped:
            raise Draining("this gateway is about to leave")
        limit = self._settings.max_running
        if len(self._run_by_id) >= limit:
            raise Overloaded(
                f"{limit} responses are already being made here", retry_after_s=_RETRY_AFTER_S
            )
        self._run_by_id[response_id] = None
        try:
            yield
        except BaseException:
            del self._run_by_id[response_id]
            raise

    def _start(
        self, plan: ResponsePlan, steps: Replay, feed: Feed, *, is_kept: bool = False
    ) -> None:
        order, first = plan.order, plan.first
        meter = self._meters.start(first.ask.head.model, order.exchange.started_s)
        run = ResponseRun(order, first, steps, plan.tools, self._means, meter, is_marked=is_kept)
        self._run_by_id[order.id] = run
        task = asyncio.create_task(self._live(order.id, run, feed, is_kept))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(
        self, response_id: ResponseId, run: ResponseRun, feed: Feed, is_kept: bool
    ) -> None:
        error: TokenMeshError | None = None
        try:
            await run.run()
        except TokenMeshError as problem:
            logger.info("%s: %s", response_id, problem.message)
            error = problem
        except Exception:
            logger.exception("%s crashed", response_id)
            error = TokenMeshError("internal error")
        finally:
            feed.close(error or run.failure)
            run.release()
            del self._run_by_id[response_id]
        outcome = feed.ended.status if feed.ended is not None else type(error).__name__
        self._metrics.counter("responses_made", outcome=outcome).inc()
        if is_kept:
            await self._leave(response_id, run, error)

    async def _leave(
        self, response_id: ResponseId, run: ResponseRun, error: TokenMeshError | None
    ) -> None:
        """Take the mark away, unless it is worth while for somebody to go on."""
        try:
            if error is None or isinstance(error, Conflict):
                # Ended; or taken over or deleted, and none of ours any more. Who finds the mark of
                # one that has ended counts its usage, so that goes first.
                if error is not None and not (await self._logs.read(response_id)).records:
                    # Its client has deleted it, which does not undo what was made.
                    run.charge()
                await self._means.admission.told(response_id)
                await self._logs.unmark(self.owner, response_id)
            elif not run.has_told and not (await self._logs.read(response_id)).frames:
                # Its only client was told of the error instead.
                await self._logs.delete(response_id)
            elif not error.retryable:
                await self.give_up(response_id, error)
        except TokenMeshError as problem:
            logger.warning("%s stays marked: %s", response_id, problem.message)

    async def close(self, begun: Begun, ended: Ended, tenant: Tenant) -> None:
        """Count what a response has used, if its owner has not. Raises as `settle`."""
        tokens = tokens_of(ended)
        if tokens is not None:
            admission = self._means.admission
            await admission.charge_for_another(tenant, begun.model, tokens, begun.id)

    def is_closing(self, response_id: ResponseId) -> bool:
        """Whether a response has ended here, and Redis is still to be told what it used."""
        return self._means.admission.waits(response_id)

    async def give_up(self, response_id: ResponseId, error: TokenMeshError) -> None:
        """Record that a response has failed, whoever was making it. Raises Conflict if it moved."""
        log = await self._logs.read(response_id)
        if log.begun is not None and log.ended is None:
            data = join_records((encode_record(failed(log, error)),))
            await self._logs.journal.append(response_log(response_id), data, log.last)
        await self._logs.unmark(self.owner, response_id)


def _begun(plan: ResponsePlan, owner: GatewayId) -> Begun:
    order = plan.order
    assert order.seed is not None, "a plan has a seed"
    return Begun(
        id=order.id,
        owner=owner,
        model=ModelName(plan.first.ask.head.model),
        body=order.body_json,
        created_s=order.created_s,
        deadline_s=order.deadline_s,
        seed=order.seed,
        is_background=order.is_background,
        tenant=order.exchange.access.tenant.name,
    )
