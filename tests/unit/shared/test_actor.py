"""Actors: every request gets exactly one final answer, whatever its handler does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.shared.actor import Actor, ActorRuntime, Context, handles
from tokenmesh.shared.actor import runtime as runtime_module
from tokenmesh.shared.bus.base import Bus, Envelope, Headers, RawAnswer, RawReceiver, Receiver
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.errors import BusLost, PayloadTooLarge, TokenMeshError, UnknownModel
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import (
    Accepted,
    Describe,
    Detokenized,
    Done,
    Drain,
    Failed,
    Message,
    Ping,
    Queued,
    Tokens,
)
from tokenmesh.shared.messages.place import Place

Outcome = Literal[
    "answer", "nothing", "refuse", "bug", "timeout", "cancel", "slow", "slow_cleanup", "interim"
]
OUTCOMES: tuple[Outcome, ...] = (
    "answer",
    "nothing",
    "refuse",
    "bug",
    "timeout",
    "cancel",
    "slow",
    "slow_cleanup",
    "interim",
)
HANDLER_TIMEOUT_S = 0.05


class Listening:
    """A subscription of the recording bus."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def stop(self) -> None:
        self.stopped.set()


class RecordingBus(Bus):
    """Keeps what an actor answers; sends nothing anywhere."""

    max_message_bytes = 1024

    def __init__(self) -> None:
        self.answers: dict[str, list[Message]] = {}
        self.refusals: list[TokenMeshError] = []
        """Raised by the next replies, one each."""
        self.subscriptions: list[Listening] = []

    async def reply(self, envelope: Envelope, message: Message) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        if envelope.reply_to is not None:
            self.answers.setdefault(envelope.reply_to, []).append(message)

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Listening:
        self.subscriptions.append(Listening())
        return self.subscriptions[-1]

    async def request(
        self,
        subject: str,
        message: Message,
        *,
        deadline_s: float,
        retries: int = 0,
        alone: str | None = None,
    ) -> Message:
        raise NotImplementedError

    def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        raise NotImplementedError

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        raise NotImplementedError

    async def publish_raw(self, subject: str, data: bytes) -> None:
        raise NotImplementedError

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Listening:
        raise NotImplementedError

    async def answer_raw(self, subject: str, answer: RawAnswer) -> Listening:
        raise NotImplementedError

    async def flush(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Scripted(Actor):
    """Does to `Describe` what the model's name says."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.release = asyncio.Event()
        self.is_stopped = False

    @handles(Describe)
    async def describe(self, message: Describe, context: Context) -> Message | None:
        self.order.append(message.model)
        match message.model:
            case "answer":
                return Detokenized(text="here")
            case "nothing":
                return None
            case "refuse":
                raise UnknownModel("no such model", param="model")
            case "bug":
                raise ZeroDivisionError
            case "timeout":
                raise TimeoutError
            case "cancel":
                raise asyncio.CancelledError
            case "interim":
                await context.interim(Queued(position=1))
                return Detokenized(text="here")
            case "slow_cleanup":
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.001)
            case _:
                await self.release.wait()
        return Done()

    @handles(Ping)
    async def ping(self, _message: Ping, context: Context) -> Detokenized:
        return Detokenized(text=f"{context.subject} {context.remaining_s() > 0}")

    @handles(Place)
    async def place(self, _message: Place, _context: Context) -> None:
        return None

    async def stop(self) -> None:
        self.is_stopped = True


class Setup:
    """An actor, its runtime and the bus it answers to."""

    def __init__(self, **limits: float) -> None:
        fields = {"handler_timeout_s": 5.0, "cancel_grace_s": 1.0} | limits
        self.bus = RecordingBus()
        self.actor = Scripted()
        self.turns: list[str] = []
        self.runtime = ActorRuntime(
            self.actor,
            self.bus,
            on_sole_turn=self._note_turn,
            settings=ServiceSettings(
                mailbox_size=int(fields.get("mailbox_size", 100)),
                concurrency=int(fields.get("concurrency", 100)),
                handler_timeout_s=fields["handler_timeout_s"],
                cancel_grace_s=fields["cancel_grace_s"],
            ),
        )

    async def _note_turn(self, turn: str) -> None:
        self.turns.append(turn)

    async def send(
        self,
        message: Message | str,
        reply_to: str | None,
        deadline_s: float | None = None,
        alone: str | None = None,
    ) -> None:
        content = Describe(model=ModelName(message)) if isinstance(message, str) else message
        headers = Headers(deadline_s=deadline_s, alone=alone)
        await self.runtime.receive(Envelope("t.subject", content, headers, reply_to))

    async def answer(self, message: Message | str, deadline_s: float | None = None) -> Message:
        """Send one request and return its only answer."""
        await self.send(message, "inbox", deadline_s)
        await self.runtime.stop(5.0)
        (answer,) = self.bus.answers["inbox"]
        return answer


def code(message: Message) -> str:
    assert isinstance(message, Failed)
    return message.code


async def test_answer_of_the_handler_is_sent() -> None:
    assert await Setup().answer("answer") == Detokenized(text="here")


async def test_handler_knows_its_subject_and_time_left() -> None:
    assert await Setup().answer(Ping()) == Detokenized(text="t.subject True")


async def test_caller_of_a_handler_without_answer_gets_done() -> None:
    assert await Setup().answer("nothing") == Done()


async def test_error_of_the_mesh_becomes_failed_with_its_facts() -> None:
    answer = await Setup().answer("refuse")
    assert answer == Failed(
        code="model_not_found", message="no such model", status=404, param="model"
    )


async def test_any_other_error_is_answered_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = await Setup().answer("bug")
    assert code(answer) == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text


async def test_timeout_inside_a_handler_is_not_mistaken_for_the_deadline() -> None:
    assert code(await Setup().answer("timeout")) == "internal_error"


async def test_message_without_handler_is_refused() -> None:
    assert code(await Setup().answer(Drain())) == "protocol_error"


async def test_past_deadline_is_answered_without_work() -> None:
    setup = Setup()
    assert code(await setup.answer("answer", deadline_s=now_s() - 1)) == "deadline_exceeded"
    assert setup.actor.order == []


async def test_handler_is_cancelled_at_its_deadline() -> None:
    started_s = now_s()
    answer = await Setup().answer("slow", deadline_s=now_s() + 0.05)
    assert code(answer) == "deadline_exceeded"
    assert now_s() - started_s < 2.0


async def test_handler_without_deadline_is_bounded_too() -> None:
    assert code(await Setup(handler_timeout_s=0.05).answer("slow")) == "deadline_exceeded"


async def test_a_sole_turn_begins_after_what_runs_and_lets_nothing_else_begin() -> None:
    setup = Setup()
    await setup.send("slow", "before")
    await setup.send("nothing", "alone", alone="turn")
    await setup.send("answer", "after")
    await asyncio.sleep(0)
    assert setup.turns == []
    setup.actor.release.set()
    await setup.runtime.stop(5.0)
    assert setup.actor.order == ["slow", "nothing", "answer"]
    assert setup.turns == ["turn", ""]
    assert setup.bus.answers["after"] == [Detokenized(text="here")]


async def test_a_sole_turn_waits_for_others_and_lasts_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "_SOLE_S", 0.05)
    setup = Setup()
    await setup.send("slow", "first", alone="one")
    await setup.send("slow", "second", alone="two")
    await setup.send("answer", "third")
    async with asyncio.timeout(15):
        while "third" not in setup.bus.answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # the second was never alone: the first one still ran
    assert setup.turns == ["one", ""]
    setup.actor.release.set()
    await setup.runtime.stop(5.0)
    assert set(setup.bus.answers) == {"first", "second", "third"}


async def test_a_turn_that_is_cancelled_is_answered_and_ends() -> None:
    setup = Setup()
    await setup.send("slow", "before")
    await setup.send("nothing", "alone", alone="turn")
    await setup.send("answer", "after")
    await setup.runtime.stop(0.0)
    assert [code(setup.bus.answers[each][0]) for each in ("before", "alone", "after")] == [
        "draining"
    ] * 3


async def test_only_what_belongs_to_a_trace_or_a_request_gets_a_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents: list[tuple[str | None, bool]] = []

    @contextmanager
    def span(_name: str, attributes: object = None, parent: str | None = None) -> Iterator[None]:
        parents.append((parent, attributes is not None))
        yield

    monkeypatch.setattr(runtime_module, "span", span)
    place = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        route_hashes=b"",
    )
    setup = Setup()
    of_none = msgspec.structs.replace(place, request_id=RequestId(""))
    sent = ((Ping(), None), (Ping(), "00-trace"), (place, None), (of_none, "00-a"))
    for message, traceparent in sent:
        headers = Headers(traceparent=traceparent)
        await setup.runtime.receive(Envelope("t.subject", message, headers, "inbox"))
    await setup.runtime.stop(5.0)
    assert parents == [("00-trace", False), (None, True), ("00-a", False)]


async def test_keep_alives_come_before_the_answer() -> None:
    setup = Setup()
    await setup.send("interim", "inbox")
    await setup.runtime.stop(5.0)
    assert setup.bus.answers["inbox"] == [Queued(position=1), Detokenized(text="here")]


async def test_full_mailbox_answers_overloaded_and_when_to_come_back() -> None:
    setup = Setup(concurrency=1, mailbox_size=2)
    for number in range(5):
        await setup.send("slow", f"inbox-{number}")
    refused = [setup.bus.answers[f"inbox-{number}"][0] for number in (3, 4)]
    assert [code(answer) for answer in refused] == ["overloaded", "overloaded"]
    assert all(isinstance(answer, Failed) and answer.retry_after_s for answer in refused)
    assert setup.runtime.counts.refused == 2
    setup.actor.release.set()
    await setup.runtime.stop(5.0)
    assert [setup.bus.answers[f"inbox-{number}"] for number in range(3)] == [[Done()]] * 3


async def test_handlers_start_in_order_of_arrival_within_their_limit() -> None:
    setup = Setup(concurrency=2)
    names = [f"slow-{number}" for number in range(6)]
    for name in names:
        await setup.send(name, name)
    await asyncio.sleep(0)
    assert setup.actor.order == names[:2]
    assert (setup.runtime.num_running, setup.runtime.num_waiting) == (2, 4)
    setup.actor.release.set()
    await setup.runtime.stop(5.0)
    assert setup.actor.order == names


async def test_stop_waits_for_handlers_and_ends_subscriptions() -> None:
    setup = Setup()
    await setup.runtime.listen("t.subject")
    await setup.send("slow", "inbox")
    stopping = asyncio.create_task(setup.runtime.stop(5.0))
    await asyncio.wait_for(setup.bus.subscriptions[0].stopped.wait(), 15.0)
    assert not stopping.done()
    setup.actor.release.set()
    await stopping
    assert setup.bus.answers["inbox"] == [Done()]
    assert setup.actor.is_stopped


@pytest.mark.parametrize("grace_s", [0.0, 0.02])
async def test_stop_answers_draining_when_the_grace_is_over(grace_s: float) -> None:
    setup = Setup(concurrency=2)
    for number in range(5):
        await setup.send("slow", f"inbox-{number}")
    await setup.runtime.stop(grace_s)
    answers = [setup.bus.answers[f"inbox-{number}"] for number in range(5)]
    assert [[code(answer) for answer in each] for each in answers] == [["draining"]] * 5


async def test_oversized_answer_is_replaced_by_why() -> None:
    setup = Setup()
    setup.bus.refusals = [PayloadTooLarge("too large")]
    assert code(await setup.answer("answer")) == "payload_too_large"


async def test_lost_answer_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    setup.bus.refusals = [BusLost("gone"), BusLost("gone")]
    await setup.send("answer", "inbox")
    await setup.runtime.stop(5.0)
    assert (setup.runtime.counts.unsent, setup.runtime.counts.answered) == (1, 0)
    assert "lost" in caplog.text


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(OUTCOMES), st.booleans(), st.booleans()), max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 5.0]),
)
def test_every_request_gets_exactly_one_final_answer(
    requests: list[tuple[Outcome, bool, bool]], concurrency: int, mailbox: int, grace_s: float
) -> None:
    async def scenario() -> None:
        setup = Setup(
            concurrency=concurrency, mailbox_size=mailbox, handler_timeout_s=HANDLER_TIMEOUT_S
        )
        for number, (outcome, has_passed, gives_way) in enumerate(requests):
            deadline_s = now_s() - 1 if has_passed else None
            await setup.send(outcome, f"inbox-{number}", deadline_s)
            if gives_way:
                await asyncio.sleep(0)
        await setup.runtime.stop(grace_s)
        for number in range(len(requests)):
            answers = setup.bus.answers[f"inbox-{number}"]
            assert len([each for each in answers if not isinstance(each, Queued)]) == 1
            assert not isinstance(answers[-1], Queued)
        assert len(setup.bus.answers) == len(requests) == setup.runtime.counts.answered

    asyncio.run(scenario())


async def test_subclass_inherits_and_replaces_handlers() -> None:
    class Stubborn(Scripted):
        @handles(Ping)
        async def ping(self, _message: Ping, _context: Context) -> Accepted | Detokenized:  # type: ignore[override]
            return Detokenized(text="stubborn")

    bus = RecordingBus()
    runtime = ActorRuntime(Stubborn(), bus, ServiceSettings())
    await runtime.receive(Envelope("t", Ping(), Headers(), "one"))
    await runtime.receive(Envelope("t", Describe(model=ModelName("answer")), Headers(), "two"))
    await runtime.stop(1.0)
    assert bus.answers == {"one": [Detokenized(text="stubborn")], "two": [Detokenized(text="here")]}


class Background(Actor):
    """Crashes a number of times, then works."""

    def __init__(self, num_crashes: int, is_fatal: bool = False) -> None:
        self.left = num_crashes
        self.is_fatal = is_fatal
        self.works = asyncio.Event()

    async def start(self) -> None:
        self.spawn(self.work, "work", is_fatal=self.is_fatal)

    async def work(self) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError("crashed")
        self.works.set()
        await asyncio.sleep(60)


async def test_crashed_background_task_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    actor = Background(num_crashes=3)
    settings = ServiceSettings(restart_min_s=0.001, restart_max_s=0.002)
    runtime = ActorRuntime(actor, RecordingBus(), settings)
    await runtime.listen("t")
    await asyncio.wait_for(actor.works.wait(), 15.0)
    assert actor.background.crashes == {"work": 3}
    assert "crashed" in caplog.text
    await runtime.stop(1.0)


async def test_fatal_background_task_tells_the_service_once() -> None:
    shown: list[str] = []
    fatal = asyncio.Event()

    def on_fatal(name: str) -> None:
        shown.append(name)
        fatal.set()

    actor = Background(num_crashes=5, is_fatal=True)
    runtime = ActorRuntime(actor, RecordingBus(), ServiceSettings(), on_fatal=on_fatal)
    await runtime.listen("t")
    await asyncio.wait_for(fatal.wait(), 15.0)
    await runtime.stop(1.0)
    assert shown == ["work"]
    assert actor.left == 4
