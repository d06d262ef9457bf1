"""The console's pages get the state of a large mesh, which is read in many turns."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.usage import Meters
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.services.gateway.core.operations.console.state import StateReader
from tokenmesh.services.gateway.core.operations.open_requests import OpenRequests
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, RequestId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.metrics import Metrics

ADMIN = Access(DEFAULT_TENANT, is_admin=True)
ACME = Tenant(name="acme")
CARD = ModelCard(
    name=ModelName("small"),
    max_model_len=64,
    vocab_size=8,
    takes_images=True,
    draft_method="ngram",
    max_drafts=8,
)

_Result = TypeVar("_Result")


def beat(number: int, **fields: Any) -> Heartbeat:
    return Heartbeat(
        service="worker",
        instance_id=InstanceId(f"worker-{number:05d}"),
        epoch=1,
        sequence=1,
        version="0.1",
        models=[CARD],
        **fields,
    )


def stream(request_id: str, tokens: int, state: SessionState, tenant: Tenant = ACME) -> Any:
    """Make the part of a stream at which the reader looks."""
    session = SimpleNamespace(token_ids=[0] * tokens, state=state, worker_id="worker-00001")
    job = SimpleNamespace(request_id=request_id, first_choice=0, tenant=tenant, card=CARD)
    return SimpleNamespace(
        session=session, job=job, prompt=SimpleNamespace(max_tokens=10, num_tokens=7)
    )


class World:
    """A gateway's parts, as far as the console reads them."""

    def __init__(self, **limits: Any) -> None:
        self.members = Members(MembershipView(4, 5000))
        self.streams: list[Any] = []
        self.requests = OpenRequests(Metrics())
        self.meters = Meters(Metrics())
        settings = Settings(gateway=GatewaySettings(**limits))
        self.reader = StateReader(
            GatewayId("gateway-1"),
            self.members,
            Catalog(self.members, settings),
            cast("Streams", SimpleNamespace(all=lambda: tuple(self.streams))),
            self.requests,
            self.meters,
            TraceStore(settings.telemetry),
            settings.gateway,
        )

    def open(self, request_id: str, tenant: Tenant = ACME) -> None:
        access = Access(tenant)
        context = RequestContext(
            RequestId(request_id),
            False,
            monotonic_s(),
            method="POST",
            path="/v1/completions",
            access=access,
        )
        self.requests.begin(context)

    def join(self, *beats: Heartbeat) -> None:
        for each in beats:
            self.members.view.observe(each, monotonic_s())


async def test_health_adds_up_the_workers() -> None:
    world = World()
    loads = [
        WorkerLoad(running=3, kv_blocks_used=5, kv_blocks_total=10, tenant_streams={"acme": 3}),
        WorkerLoad(running=1, waiting=2, kv_blocks_total=30, tenant_streams={"acme": 1, "bolt": 2}),
        WorkerLoad(sleep_level=1, kv_blocks_total=10),
    ]
    world.join(*(beat(number, load=load) for number, load in enumerate(loads)))
    world.join(beat(3, draining=True))
    world.meters.first_tokens.extend((monotonic_s(), float(each)) for each in range(1, 101))
    await world.reader.sample()
    mesh = (await world.reader.read(ADMIN)).mesh
    assert mesh is not None
    health = mesh.health
    assert (health.workers, health.workers_up, health.streams, health.waiting) == (4, 2, 4, 2)
    assert health.kv_used == pytest.approx(5 / 50)
    assert (health.ttft_p50_s, health.ttft_p95_s) == (51.0, 96.0)
    assert mesh.tenant_streams == {"acme": 4, "bolt": 2}
    assert [each.draining for each in mesh.processes] == [False, False, False, True]


async def test_a_model_is_shown_with_its_method_of_drafts_and_their_number() -> None:
    world = World()
    world.join(beat(1))
    (model,) = (await world.reader.read(Access(ACME))).models
    assert (model.name, model.draft_method, model.max_drafts) == ("small", "ngram", 8)


async def test_the_choices_of_a_request_are_one_row() -> None:
    world = World()
    world.open("one")
    world.open("two")
    world.streams = [stream("one", 4, SessionState.RUNNING), stream("one", 0, SessionState.PLACING)]
    world.streams.append(stream("no connection", 0, SessionState.PLACING))
    await world.reader.sample()
    two, one, other = (await world.reader.read(Access(ACME))).requests.newest
    assert (two.id, two.phase, two.max_tokens) == ("two", "preparing", 0)
    assert (one.phase, one.output_tokens, one.max_tokens) == ("generating", 4, 20)
    assert (one.prompt_tokens, one.workers) == (7, ["worker-00001"])
    assert (other.id, other.path, other.phase) == ("no connection", "", "placing")


async def test_a_tenant_gets_no_row_of_another_one() -> None:
    world = World()
    world.open("theirs", Tenant(name="bolt"))
    world.streams = [stream("background", 1, SessionState.RUNNING, Tenant(name="bolt"))]
    world.join(beat(1))
    await world.reader.sample()
    state = await world.reader.read(Access(ACME))
    assert (state.requests.total, state.mesh) == (0, None)
    assert (await world.reader.read(ADMIN)).requests.total == 2


async def turns_of(work: Awaitable[_Result]) -> tuple[int, _Result]:
    """Count the turns of the event loop while some work was done; return its result, too."""
    task, num_turns = asyncio.ensure_future(work), 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    return num_turns, task.result()


async def test_many_streams_and_processes_are_read_in_turns_and_shown_in_part() -> None:
    world = World(max_console_rows=20)
    for number in range(5000):
        world.open(f"request-{number}")
        world.streams.append(stream(f"request-{number}", 1, SessionState.RUNNING))
    for number in range(4000):
        world.join(beat(number, load=WorkerLoad(running=1)))
    turns, _ = await turns_of(world.reader.sample())
    assert turns > 3, "all in one turn"
    turns, state = await turns_of(world.reader.read(ADMIN))
    assert turns > 3, "all in one turn"
    assert state.mesh is not None
    assert (state.mesh.num_processes, len(state.mesh.processes)) == (4000, 20)
    assert state.mesh.health.streams == 4000
    assert (state.requests.total, len(state.requests.newest)) == (5000, 20)
    assert state.requests.newest[0].id == "request-4999"
