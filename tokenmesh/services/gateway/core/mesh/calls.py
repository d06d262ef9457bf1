"""ServiceCalls: requests to the other services, with deadlines, hedging and retries.

A service of several processes is a queue group. When one process does not answer, the request also
goes to another one, by its instance's subject.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from tokenmesh.services.gateway.core.generation.request import Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts, prompt_size
from tokenmesh.services.gateway.core.mesh.retries import RetryPolicy, hedged_request, is_refusal
from tokenmesh.services.gateway.core.mesh.sole_turns import SoleTurns
from tokenmesh.services.gateway.core.mesh.wakes import ModelWakes
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.errors import (
    Asleep,
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages import (
    Encode,
    Encoded,
    Message,
    Place,
    Placed,
    Refused,
    Tokenize,
    Tokenized,
    Wake,
)
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import REQUEST_ID, Span, span
from tokenmesh.shared.tokens import BYTES_PER_ID

_Answer = TypeVar("_Answer")
_MAX_CANDIDATES: Final = 16
"""Candidates of a placement that are shown in its span."""


class ServiceCalls:
    """The bus as the gateway uses it."""

    def __init__(
        self,
        bus: Bus,
        settings: CallSettings,
        members: Members,
        left_out: Callable[[], list[WorkerId]],
        prompts: HeldPrompts,
        metrics: Metrics,
    ) -> None:
        """`left_out`: workers that placements exclude. `prompts` keeps those too large for a
        message."""
        self._bus = bus
        self._settings = settings
        self._members = members
        self._replica_of = partial(newest_replica, members)
        self._left_out = left_out
        self._prompts = prompts
        self._metrics = metrics
        self.wakes = ModelWakes(bus, members, settings, metrics, self._ask_scheduler)

    @property
    def max_message_bytes(self) -> int:
        """Size limit of a message on the bus."""
        return self._bus.max_message_bytes

    async def request(
        self,
        subject: str,
        message: Message,
        expected: type[_Answer],
        *,
        timeout_s: float,
        deadline_s: float,
        hedge_after_s: float | None = None,
    ) -> _Answer:
        """The answer. One attempt lasts `timeout_s` at most, and all attempts end at `deadline_s`.

        A hedged request follows after `hedge_after_s` (default: `second_ask_s`) of silence, and
        when a process has come back; where processes were lost, sole turns take its place. While
        no process can be reached it waits for `service_wait_s`, and for as long as one is starting
        that did not fail to repeatedly.

        Raises the last error, ProtocolError for an answer of another type, InvalidInput when
        processes died of the message.
        """
        service = subjects.service_of(subject)
        is_starting = partial(self._members.is_starting, service)
        policy = RetryPolicy(self._settings, deadline_s, is_starting)
        turns = SoleTurns(
            self._bus, self._members, subject, self._metrics, self._settings.service_wait_s
        )
        while True:
            limit_s = min(deadline_s, now_s() + timeout_s)
            try:
                answer = await hedged_request(
                    partial(self._send, subject, message, limit_s),
                    hedge_after_s=hedge_after_s or self._settings.second_ask_s,
                    max_requests=self._settings.call_attempts,
                    next_return=partial(self._members.next_return, service),
                    turns=turns,
                    ask_alone=partial(turns.ask, message, limit_s),
                )
            except TokenMeshError as error:
                self._check_loads(service, message, error)
                await policy.wait(error)
            else:
                return _checked(answer, expected)

    def _check_loads(self, service: str, message: Message, error: TokenMeshError) -> None:
        """Raises Unavailable where no process listens because none can load the model."""
        model: ModelName | None = getattr(message, "model", None)
        if model is None or not isinstance(error, NoResponders):
            return
        if reason := self._members.broken(service, model):
            raise Unavailable(f"the {service} cannot load the model {model}: {reason}") from error

    async def _send(
        self, subject: str, message: Message, limit_s: float, is_hedge: bool
    ) -> Message:
        subject = self._replica_of(subject) if is_hedge else subject
        return await self._bus.request(subject, message, deadline_s=limit_s)

    async def tokenize(self, message: Tokenize, deadline_s: float) -> Tokenized:
        """Any tokenizer's answer. Raises as `request` does, and errors of the prompt."""
        settings = self._settings
        with self._prompts.holding(message, self.max_message_bytes) as sent:
            return await self.request(
                subjects.tokenize(message.model),
                sent,
                Tokenized,
                timeout_s=settings.tokenize_timeout_s,
                deadline_s=deadline_s,
                # A long prompt takes longer, and should not be encoded several times for that.
                hedge_after_s=settings.second_ask_s
                + _num_units(message) / settings.second_ask_chars_per_s,
            )

    async def encode(self, message: Encode, deadline_s: float) -> Encoded:
        """Any encoder's answer. Raises as `request` does."""
        return await self.request(
            subjects.encode(message.model),
            message,
            Encoded,
            timeout_s=self._settings.encode_timeout_s,
            deadline_s=deadline_s,
            hedge_after_s=self._settings.second_encode_s,
        )

    async def place_traced(self, message: Place, deadline_s: float) -> Placed:
        """`place` in a span that shows the decision."""
        with span("place", {REQUEST_ID: message.request_id}) as current:
            placed = await self.place(message, deadline_s)
            trace_placement(current, placed)
        return placed

    async def place(self, message: Place, deadline_s: float) -> Placed:
        """Wait for a worker for as long as a scheduler keeps the request queued.

        Wakes a model on demand. Raises Asleep when that fails, Overloaded when a scheduler refuses,
        Unavailable when it has waited for a worker in vain, and the last error when no scheduler
        has answered for `service_wait_s`.
        """
        asleep_s = 0.0
        if left_out := self._left_out():
            exclude = list(dict.fromkeys((*message.exclude, *left_out)))
            message = msgspec.structs.replace(message, exclude=exclude)
        while True:
            try:
                return _checked(await self._ask_scheduler(message, deadline_s), Placed)
            except Asleep:
                is_again, asleep_s = asleep_s > 0, asleep_s or monotonic_s()
                if not self._may_wake(message.model, asleep_s):
                    raise
                if is_again:
                    # the scheduler may not have the heartbeat of a worker that woke up just now
                    await asyncio.sleep(self._settings.retry_pause_s)
                await self.wakes.wake(message.model, message.request_id, deadline_s)

    async def _ask_scheduler(self, message: Place | Wake, deadline_s: float) -> Message:
        """The last answer of any scheduler, which reports with Queued that it works on it.

        Raises its error, and the last one when no scheduler has answered for `service_wait_s`.
        """
        subject = group = subjects.place(message.model)
        is_starting = partial(self._members.is_starting, subjects.service_of(group))
        policy = RetryPolicy(self._settings, deadline_s, is_starting)
        first_answer_s = self._settings.second_ask_s
        while True:
            try:
                return await self._converse(subject, message, deadline_s, first_answer_s)
            except TokenMeshError as error:
                if is_refusal(error):
                    raise
                is_silence = isinstance(error, DeadlineExceeded)
                await policy.wait(error, is_silence=is_silence)
                # The replica chosen last may be dead by now: then any process will do.
                subject = self._replica_of(group) if is_silence else group
                first_answer_s = min(first_answer_s * 2, self._settings.place_idle_s)

    def _may_wake(self, model: ModelName, asleep_s: float) -> bool:
        """Return whether to wake a model that a scheduler saw asleep first at `asleep_s`,
        monotonic.
        """
        is_in_time = monotonic_s() - asleep_s < self._settings.wake_timeout_s
        return is_in_time and self.wakes.is_on_demand(model)

    async def _converse(
        self, subject: str, message: Place | Wake, deadline_s: float, first_answer_s: float
    ) -> Message:
        """`first_answer_s`: a live scheduler reports at once that the request is queued."""
        answer: Message | None = None
        idle_s = self._settings.place_idle_s
        answers = self._bus.converse(subject, message, deadline_s=deadline_s, idle_s=idle_s)
        try:
            async with asyncio.timeout(min(first_answer_s, idle_s)) as timeout:
                # To the end: the event loop starts a task to close a generator that is left early.
                async for each in answers:
                    answer = each
                    timeout.reschedule(None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {subject} in time") from error
        if isinstance(answer, Refused):
            raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
        if answer is None:
            raise ProtocolError(f"no answer from {subject}")
        return answer


def place_of(job: PromptJob, prompt: Prompt, num_output: int) -> Place:
    """The request for a worker; `num_output` tokens of output are already delivered."""
    adapter = job.card.adapter
    return Place(
        request_id=job.request_id,
        model=job.card.name,
        num_tokens=prompt.num_tokens + num_output,
        max_tokens=prompt.max_tokens,
        num_streams=job.n,
        route_hashes=prompt.route_hashes,
        priority=job.priority,
        tenant=job.tenant.name,
        weight=job.tenant.weight,
        tenant_priority=job.tenant.priority,
        has_grammar=job.sampling.structured is not None,
        lora=None if adapter is None else adapter.name,
        lora_hash="" if adapter is None else adapter.content_hash,
    )


def card_attributes(card: ModelCard) -> dict[str, str]:
    """Return what spans say of a model: how its weights are kept, and the adapter that a request
    names.
    """
    found = {"tokenmesh.weight_format": card.weight_format} if card.weight_format else {}
    if card.ranks > 1:
        found["tokenmesh.ranks"] = str(card.ranks)
    if card.stages > 1:
        found["tokenmesh.stages"] = str(card.stages)
    return found if card.adapter is None else {**found, "tokenmesh.adapter": card.adapter.name}


def trace_placement(current: Span, placed: Placed) -> None:
    """Write the worker, the reason and the candidates with their scores to the span."""
    current.set_attribute("tokenmesh.worker", placed.worker_id)
    current.set_attribute("tokenmesh.queued_s", placed.queued_s)
    current.set_attribute("tokenmesh.placed_because", placed.reason)
    for each in placed.candidates[:_MAX_CANDIDATES]:
        candidate: dict[str, str | float] = {
            "worker": each.worker_id,
            "estimated_ttft_s": each.estimated_ttft_s,
            "cost_s": each.cost_s,
            "running": each.running,
            "kv_usage": each.kv_usage,
            "matched_tokens": each.matched_tokens,
            "reserved_tokens": each.reserved_tokens,
        }
        current.add_event("candidate", candidate)


def newest_replica(members: Members, subject: str) -> str:
    """The subject of the process of a group whose heartbeat is the newest, so that it is alive.

    `subject` itself if no process is known.
    """
    found = [
        each for each in members.service(subjects.service_of(subject)) if not each.beat.draining
    ]
    if not found:
        return subject
    last = max(found, key=lambda each: each.last_seen)
    return subjects.replica(subject, last.beat.instance_id)


def _num_units(message: Tokenize) -> int:
    """Characters of a text, or ids of a prompt that is tokenized already."""
    num_bytes = prompt_size(message)
    return num_bytes // BYTES_PER_ID if isinstance(message.prompt, IdsPrompt) else num_bytes


def _checked(answer: object, expected: type[_Answer]) -> _Answer:
    if not isinstance(answer, expected):
        got = type(answer).__name__
        raise ProtocolError(f"the answer is {got}, not {expected.__name__}")
    return answer
