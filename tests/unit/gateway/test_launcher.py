"""Getting a stream onto a worker: bounded, whatever the worker does with it."""

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.unit.gateway.test_pipeline import JOB
from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.generation.prompt_job import Prompt
from tokenmesh.services.gateway.mesh.breaker import Breaker
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.cancels import Cancels
from tokenmesh.services.gateway.mesh.launcher import Launcher
from tokenmesh.services.gateway.mesh.stages import Stages
from tokenmesh.services.gateway.mesh.streams import Streams
from tokenmesh.services.gateway.mesh.watch_times import WatchTimes
from tokenmesh.shared.bus.base import Bus, Envelope, Headers
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Accepted, Generate, Message, Place, Placed, Tokens
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics

WORKER = WorkerId("w")
SETTINGS = GatewaySettings(retry_pause_s=0.001, stream_attempts=4, breaker_failures=100.0)


class Moody:
    """One worker, and a scheduler that knows no other: it accepts all, and breaks off at once."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.streams: Streams | None = None

    async def request(self, _subject: str, message: Message, *, deadline_s: float) -> Message:
        assert isinstance(message, Generate)
        assert self.streams is not None
        self.num_asked += 1
        assert self.num_asked < 50, "there is no end to it"
        end = Delta(message.stream, message.attempt, 0, b"", "abort")
        # The connection for tokens may well be quicker than the one for answers.
        await self.streams.receive(Envelope("", Tokens(WORKER, 1, 1, [end]), Headers()))
        return Accepted(worker_id=WORKER)

    async def place(self, _message: Place, _deadline_s: float) -> Placed:
        return Placed(worker_id=WORKER, epoch=1)


class NotingBreaker(Breaker):
    """Notes every failure that it is told."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.failures: list[str] = []

    def fail(self, worker_id: WorkerId, kind: str) -> None:
        self.failures.append(kind)
        super().fail(worker_id, kind)


async def test_a_worker_that_accepts_and_loses_is_asked_a_few_times_only() -> None:
    moody, breaker = Moody(), NotingBreaker()
    bus, calls = cast("Bus", cast("Any", moody)), cast("ServiceCalls", cast("Any", moody))
    cancels = Cancels(bus, GatewayId("g"), 100)
    moody.streams = streams = Streams(WatchTimes(), cancels, max_streams=8, max_told=8)
    launcher = Launcher(bus, calls, streams, SETTINGS, Metrics(), breaker)
    stages = Stages(GatewayId("g"), calls, streams, launcher, SETTINGS)
    prompt = Prompt(packed_ids=b"\0\0\0\0", num_tokens=1, max_tokens=1)
    job = replace(JOB, deadline_s=now_s() + 60)
    placed = Placed(worker_id=WORKER, epoch=1)
    with pytest.raises(Unavailable, match="aborted"):
        await stages.generate(job, prompt, placed, Inbox(10)).__aenter__()
    assert moody.num_asked == SETTINGS.stream_attempts
    # What one loss is must not count twice: two would leave the worker out.
    assert breaker.failures == ["broken off"] * SETTINGS.stream_attempts
    assert not len(streams)
