"""Commands to all workers of a model, and their combined answers."""

import asyncio
from typing import Any

import pytest

from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.operations.commands import Admin
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Conflict, ProtocolError, Unavailable
from tokenmesh.shared.ids import InstanceId, ModelName, WorkerId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Done, Heartbeat, Sleep, Slept
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.subjects import worker_control

MODEL = ModelName("m")


class FakeBus:
    """Answers by subject; an exception is raised."""

    def __init__(self, **answers: object) -> None:
        self.asked: list[str] = []
        self._answers = {worker_control(WorkerId(name)): each for name, each in answers.items()}

    async def request(self, subject: str, _message: object, *, deadline_s: float) -> object:
        self.asked.append(subject)
        answer = self._answers[subject]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Fleet:
    """Workers known by their heartbeats."""

    def __init__(self) -> None:
        self.members = Members(MembershipView(missed_beats=100, max_members=100))
        self._sequence = 0

    def beat(self, name: str, level: int = 0, *, draining: bool = False) -> None:
        self._sequence += 1
        beat = Heartbeat(
            service="worker",
            instance_id=InstanceId(name),
            epoch=1,
            sequence=self._sequence,
            version="0",
            draining=draining,
            models=[ModelCard(name=MODEL, max_model_len=8, vocab_size=8)],
            load=WorkerLoad(sleep_level=level),
        )
        self.members.view.observe(beat, monotonic_s())

    def admin(self, bus: Any, **settings: Any) -> Admin:
        limits = GatewaySettings(**settings)
        return Admin(bus, self.members, Catalog(self.members, Settings()), limits)


async def test_every_worker_that_is_not_draining_gets_the_command() -> None:
    fleet = Fleet()
    fleet.beat("b", 1)
    fleet.beat("a")
    fleet.beat("leaving", draining=True)
    bus = FakeBus(a=Slept(level=1, freed_bytes=5), b=Slept(level=2))
    admin = fleet.admin(bus)
    answers = await admin.command(None, Sleep(), Slept)
    assert [(name, each.level) for name, each in answers.items()] == [("a", 1), ("b", 2)]
    assert bus.asked == [worker_control(WorkerId("a")), worker_control(WorkerId("b"))]
    assert admin.sleep_levels(MODEL) == {"a": 0, "b": 1}


async def test_an_error_names_its_worker_and_keeps_its_class() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.beat(name)
    bus = FakeBus(a=Slept(level=1), b=Conflict("busy", retry_after_s=3), c=Slept(level=1))
    with pytest.raises(Conflict) as error:
        await fleet.admin(bus).command(MODEL, Sleep(), Slept)
    assert error.value.message == "b: busy (2 of 3 workers succeeded)"
    assert error.value.retry_after_s == 3
    assert len(bus.asked) == 3


async def test_a_wrong_answer_is_a_protocol_error_and_a_defect_propagates() -> None:
    fleet = Fleet()
    fleet.beat("a")
    with pytest.raises(ProtocolError, match="a: the answer is Done"):
        await fleet.admin(FakeBus(a=Done())).command(MODEL, Sleep(), Slept)
    with pytest.raises(ZeroDivisionError):
        await fleet.admin(FakeBus(a=ZeroDivisionError())).command(MODEL, Sleep(), Slept)


async def test_a_model_whose_workers_all_drain_is_unavailable() -> None:
    fleet = Fleet()
    fleet.beat("a", draining=True)
    with pytest.raises(Unavailable, match="no worker serves"):
        await fleet.admin(FakeBus()).command(MODEL, Sleep(), Slept)


async def test_the_response_waits_for_heartbeats_or_the_end_of_the_worker() -> None:
    fleet = Fleet()
    fleet.beat("a")
    admin = fleet.admin(FakeBus())
    levels = {WorkerId("a"): 1, WorkerId("gone"): 1}
    waiting = asyncio.create_task(admin.wait_for_levels(levels))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    fleet.beat("a", 1)
    await asyncio.wait_for(waiting, 15)
    with pytest.raises(Unavailable, match="beats"):
        await fleet.admin(FakeBus(), admin_timeout_s=0.05).wait_for_levels({WorkerId("a"): 0})
