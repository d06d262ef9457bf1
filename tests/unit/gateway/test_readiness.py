"""/readyz: which services have to live."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.readiness import readiness
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad

TEXT = ModelCard(name=ModelName("text"), max_model_len=10, vocab_size=9)
VISION = ModelCard(name=ModelName("vision"), max_model_len=10, vocab_size=9, needs_encoder=True)
OTHERS = ("tokenizer", "scheduler")


def answer_of(
    *cards: ModelCard, services: tuple[str, ...] = OTHERS, starting: tuple[str, ...] = ()
) -> tuple[int, Any]:
    members = Members(MembershipView(4, 100))

    def observe(service: str, card: ModelCard | None = None, starts: bool = False) -> None:
        beat = Heartbeat(
            service=service,
            instance_id=InstanceId(f"{service}-{card.name if card else starts}"),
            epoch=1,
            sequence=1,
            version="0",
            interval_s=60.0,
            models=[card] if card else [],
            load=WorkerLoad() if card else None,
            starts=[ModelName("text")] if starts else [],
        )
        members.view.observe(beat, monotonic_s())

    for service in services:
        observe(service)
    for service in starting:
        observe(service, starts=True)
    for card in cards:
        observe("worker", card)
    core = SimpleNamespace(
        id="g",
        members=members,
        settings=GatewaySettings(),
        draining=asyncio.Event(),
        mesh=SimpleNamespace(catalog=Catalog(members, Settings())),
    )
    response = readiness(cast("Any", core))
    return response.status_code, json.loads(bytes(response.body))


@pytest.mark.parametrize("service", OTHERS)
def test_a_service_that_is_missing_or_starting_is_named(service: str) -> None:
    others = tuple(each for each in OTHERS if each != service)
    missing = (503, {"ready": False, "missing": [service]})
    assert answer_of(TEXT, services=others) == missing
    assert answer_of(TEXT, services=others, starting=(service,)) == missing
    assert answer_of(TEXT)[0] == 200


def test_a_model_that_takes_media_needs_an_encoder() -> None:
    missing = (503, {"ready": False, "missing": ["encoder"]})
    assert answer_of(VISION) == missing
    assert answer_of(VISION, starting=("encoder",)) == missing
    assert answer_of(VISION, services=(*OTHERS, "encoder"))[0] == 200


def test_another_model_is_served_without_an_encoder() -> None:
    assert answer_of(VISION, TEXT)[0] == 200
