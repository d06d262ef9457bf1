"""Drain from the bus: any service leaves, with the exit code that keeps it away."""

import asyncio

import pytest

from tests.contract.test_service import INSTANCE, running, settings
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import Draining
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.lifecycle import ExitCode
from tokenmesh.shared.messages import Done, Drain, Ping

__all__ = ["settings"]


async def drain(bus: MessageBus) -> None:
    subject = subjects.process_control(InstanceId(INSTANCE))
    assert await bus.request(subject, Drain(), deadline_s=now_s() + 5) == Done()


async def test_a_process_that_receives_drain_leaves_and_reports_it(
    bus: MessageBus, settings: Settings
) -> None:
    async with running(settings) as service:
        mesh = await service.ready()
        await drain(bus)
        assert await service.exit_code() == ExitCode.DRAINED
        assert mesh.draining


async def test_a_signal_after_the_command_does_not_cut_the_work_short(
    bus: MessageBus, settings: Settings
) -> None:
    async with running(settings) as service:
        await service.ready()
        service.actor.hang = True
        asking = asyncio.create_task(bus.request("t.greet", Ping(), deadline_s=now_s() + 5))
        await asyncio.sleep(0)
        await drain(bus)
        service.stops.stop("SIGTERM")
        assert not service.stops.second.is_set()
        service.stops.stop("SIGTERM")
        assert service.stops.second.is_set()
        with pytest.raises(Draining):
            await asking
        assert await service.exit_code() == ExitCode.DRAINED
