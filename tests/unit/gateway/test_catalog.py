"""The served models are those of live workers, and for some time those of workers that left."""

import asyncio

import pytest

from tokenmesh.services.gateway.core.mesh.catalog import WORKER, Catalog
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Unavailable, UnknownModel
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard

MEMORY_S = 30.0


class Mesh:
    """A catalog with workers that join and leave, and its own clock."""

    def __init__(self, *configured: str) -> None:
        self.now = 100.0
        self.view = MembershipView(4, 100)
        settings = Settings(
            models=tuple(ModelSettings(model=name) for name in configured),
            scheduler=SchedulerSettings(worker_wait_s=MEMORY_S),
        )
        self.catalog = Catalog(Members(self.view), settings, lambda: self.now)

    def beat(
        self,
        model: str,
        *,
        service: str = WORKER,
        leaving: bool = False,
        number: int = 0,
        length: int = 64,
        starts: bool = False,
    ) -> None:
        card = ModelCard(name=ModelName(model), max_model_len=length, vocab_size=8)
        beat = Heartbeat(
            service=service,
            instance_id=InstanceId(f"worker-{model}-{number}"),
            epoch=1,
            sequence=int(self.now * 1000),
            interval_s=1e9,
            version="1",
            models=[] if starts else [card],
            starts=[card.name] if starts else [],
            leaving=leaving,
        )
        self.now += 1.0
        self.view.observe(beat, self.now)
        self.catalog.on_beat(beat)


async def test_models_that_only_a_tokenizer_knows_can_count_as_served() -> None:
    mesh = Mesh()
    known, served = (
        ModelCard(name=ModelName("a"), max_model_len=length, vocab_size=8) for length in (32, 64)
    )
    both = Catalog(Members(mesh.view), Settings(), lambda: mesh.now + 60.0, includes_tokenized=True)
    beat = Heartbeat(
        service="tokenizer",
        instance_id=InstanceId("tokenizer-1"),
        epoch=1,
        sequence=1,
        interval_s=1e9,
        version="1",
        tokenizes=[known],
    )
    mesh.view.observe(beat, mesh.now)
    for catalog in (mesh.catalog, both):
        catalog.on_beat(beat)
        assert catalog.has_tokenizer(ModelName("a"))
        assert not catalog.has_tokenizer(ModelName("b"))
    assert both.find("a") == both.find(None) == known
    assert mesh.catalog.all() == []
    mesh.now += 60.0
    with pytest.raises(UnknownModel):
        mesh.catalog.find("a")
    mesh.beat("a")
    assert both.find("a") == served


@pytest.mark.parametrize("lengths", [(64, 32), (32, 64)])
def test_of_workers_with_contexts_of_different_lengths_the_shortest_counts(
    lengths: tuple[int, int],
) -> None:
    mesh = Mesh()
    for number, length in enumerate(lengths):
        mesh.beat("a", number=number, length=length)
    assert mesh.catalog.find("a").max_model_len == 32
    assert [card.max_model_len for card in mesh.catalog.all()] == [32]
    mesh.beat("a", number=lengths.index(32), length=32, leaving=True)
    assert mesh.catalog.find("a").max_model_len == 64


async def test_a_new_gateway_waits_for_the_first_heartbeats() -> None:
    mesh = Mesh()
    looking = asyncio.create_task(mesh.catalog.find_soon("a"))
    await asyncio.sleep(0.12)
    assert not looking.done()
    mesh.beat("b")
    mesh.beat("a")
    async with asyncio.timeout(15):
        assert (await looking).name == "a"


@pytest.mark.parametrize(("hears", "seconds"), [(False, 31.0), (True, 1.0)])
async def test_a_new_gateway_waits_for_a_bounded_time(hears: bool, seconds: float) -> None:
    mesh = Mesh("configured")
    if hears:
        mesh.beat("b")
    mesh.now += seconds
    async with asyncio.timeout(15):
        with pytest.raises(UnknownModel):
            await mesh.catalog.find_soon("a")
        with pytest.raises(Unavailable):
            await mesh.catalog.find_soon("configured")


def test_a_model_whose_last_worker_has_just_left_is_found() -> None:
    mesh = Mesh()
    mesh.beat("a")
    mesh.beat("a", leaving=True)
    assert mesh.catalog.all() == []
    assert mesh.catalog.find("a").name == "a"
    assert mesh.catalog.find(None).name == "a"


def test_a_model_is_forgotten_after_the_time_that_a_scheduler_waits() -> None:
    mesh = Mesh("a")
    mesh.beat("a")
    mesh.beat("b")
    for model in "ab":
        mesh.beat(model, leaving=True)
    mesh.now += MEMORY_S + 1
    with pytest.raises(Unavailable, match="no worker serves"):
        mesh.catalog.find("a")
    with pytest.raises(UnknownModel):
        mesh.catalog.find("b")


def test_a_served_model_has_precedence_over_a_remembered_one() -> None:
    mesh = Mesh()
    mesh.beat("a")
    mesh.beat("b")
    mesh.beat("a", leaving=True)
    assert mesh.catalog.find(None).name == "b"


def test_only_workers_serve_models() -> None:
    mesh = Mesh()
    mesh.beat("a", service="scheduler")
    mesh.beat("a", service="scheduler", leaving=True)
    with pytest.raises(UnknownModel):
        mesh.catalog.find("a")


def test_the_memory_is_bounded() -> None:
    mesh = Mesh()
    for number in range(1100):
        mesh.beat(f"m{number}")
        mesh.beat(f"m{number}", leaving=True)
    mesh.now = 100.0
    with pytest.raises(UnknownModel):
        mesh.catalog.find("m0")
    assert mesh.catalog.find("m1099").name == "m1099"


def test_a_model_stays_known_while_a_worker_loads_it_again() -> None:
    mesh = Mesh()
    mesh.beat("a")
    mesh.beat("a", leaving=True)
    mesh.now += MEMORY_S + 1
    with pytest.raises(UnknownModel):
        mesh.catalog.find("a")
    mesh.beat("a", number=1, starts=True)
    assert mesh.catalog.find("a").name == "a"
    assert mesh.catalog.all() == []


def test_a_model_that_was_never_served_is_unavailable_while_a_worker_loads_it() -> None:
    mesh = Mesh()
    mesh.beat("b")
    mesh.beat("a", starts=True)
    with pytest.raises(Unavailable):
        mesh.catalog.find("a")
