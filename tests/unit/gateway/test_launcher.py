"""Starting a stream on a worker: the attempts are bounded, whatever the worker does."""

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.unit.gateway.test_pipeline import JOB
from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import Prompt
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.services.gateway.core.mesh.liveness import Breaker
from tokenmesh.services.gateway.core.mesh.stages import Stages
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Accepted, Generate, Message, Place, Placed, Tokens
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics

WORKER = WorkerId("w")
SETTINGS = GatewaySettings(retry_pause_s=0.001, stream_attempts=4, breaker_failures=100.0)


class AbortingWorker:
    """One worker, and a scheduler that knows no other. It accepts all streams and aborts them."""

    def __init__(self) -> None:
        self.num_started = 0
        self.streams: Streams | None = None
        self.launcher: Launcher | None = None

    async def request(self, _subject: str, message: Message, *, deadline_s: float) -> Message:
        assert isinstance(message, Generate)
        assert self.streams is not None
        assert self.launcher is not None
        self.num_started += 1
        assert self.num_started < 50, "the attempts are not bounded"
        end = Delta(message.stream, message.attempt, 0, b"", "abort")
        # The connection for tokens may be faster than the one for answers.
        for stream in self.streams.take(Tokens(WORKER, 1, 1, [end])):
            self.launcher.recover(stream)
        return Accepted(worker_id=WORKER)

    async def place_traced(self, _message: Place, _deadline_s: float) -> Placed:
        return Placed(worker_id=WORKER, epoch=1)


class RecordingBreaker(Breaker):
    """Records every failure."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.failures: list[str] = []

    def fail(self, worker_id: WorkerId, kind: str) -> None:
        self.failures.append(kind)
        super().fail(worker_id, kind)


async def test_a_worker_that_accepts_and_aborts_is_tried_a_few_times() -> None:
    worker, breaker = AbortingWorker(), RecordingBreaker()
    bus, calls = cast("Bus", cast("Any", worker)), cast("ServiceCalls", cast("Any", worker))
    gateway = GatewayId("g")
    worker.streams = streams = Streams(gateway, bus, SETTINGS, breaker)
    worker.launcher = launcher = Launcher(gateway, bus, calls, streams, SETTINGS, Metrics())
    stages = Stages(calls, streams, launcher)
    prompt = Prompt(packed_ids=b"\0\0\0\0", num_tokens=1, max_tokens=1)
    job = replace(JOB, deadline_s=now_s() + 60)
    placed = Placed(worker_id=WORKER, epoch=1)
    with pytest.raises(Unavailable, match="aborted"):
        await stages.generate(job, prompt, placed, Inbox(10)).__aenter__()
    assert worker.num_started == SETTINGS.stream_attempts
    # One loss must count once: two would leave the worker out.
    assert breaker.failures == ["broken off"] * SETTINGS.stream_attempts
    assert not len(streams)
