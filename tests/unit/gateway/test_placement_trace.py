"""Every placement is in the trace with its candidates, also that of a migration."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.unit.gateway.test_pipeline import JOB
from tokenmesh.services.gateway.core.generation.request import Prompt
from tokenmesh.services.gateway.core.mesh import calls as calls_module
from tokenmesh.services.gateway.core.mesh.calls import (
    ServiceCalls,
    card_attributes,
    trace_placement,
)
from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Place, Placed
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.place import Candidate
from tokenmesh.shared.metrics import Metrics

CANDIDATES = [
    Candidate(
        worker_id=WorkerId(f"w{number}"),
        estimated_ttft_s=0.5 * number,
        cost_s=0.75,
        running=number,
        kv_usage=0.25,
        matched_tokens=64,
        reserved_tokens=7,
    )
    for number in range(20)
]
PLACED = Placed(
    worker_id=WorkerId("w1"), epoch=3, queued_s=0.1, candidates=CANDIDATES, reason="cost"
)


class RecordedSpan:
    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []

    def set_attribute(self, name: str, value: object) -> None:
        self.attributes[name] = value

    def add_event(self, name: str, attributes: dict[str, Any]) -> None:
        self.events.append((name, attributes))


class PlacingCalls(ServiceCalls):
    """Answers every placement at once."""

    def __init__(self) -> None:
        """Without a bus."""

    async def place(self, message: Place, deadline_s: float) -> Placed:
        return PLACED


def test_spans_name_the_adapter_and_the_format_of_the_weights() -> None:
    card = replace(JOB.card, weight_format="gptq")
    assert card_attributes(card) == {"tokenmesh.weight_format": "gptq"}
    many = {"tokenmesh.weight_format": "gptq", "tokenmesh.ranks": "2"}
    assert card_attributes(replace(card, ranks=2)) == many
    adapted = replace(card, adapter=AdapterCard(name="sql", content_hash="1"), weight_format="")
    assert card_attributes(adapted) == {"tokenmesh.adapter": "sql"}


def test_the_span_has_the_worker_the_reason_and_the_candidates() -> None:
    recorded = RecordedSpan()
    trace_placement(recorded, PLACED)  # type: ignore[arg-type]
    assert recorded.attributes == {
        "tokenmesh.worker": "w1",
        "tokenmesh.queued_s": 0.1,
        "tokenmesh.placed_because": "cost",
    }
    assert len(recorded.events) == 16
    assert recorded.events[1] == (
        "candidate",
        {
            "worker": "w1",
            "estimated_ttft_s": 0.5,
            "cost_s": 0.75,
            "running": 1,
            "kv_usage": 0.25,
            "matched_tokens": 64,
            "reserved_tokens": 7,
        },
    )


async def test_a_migration_traces_its_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: dict[str, RecordedSpan] = {}

    @contextmanager
    def span(name: str, *_: object, **__: object) -> Iterator[RecordedSpan]:
        yield spans.setdefault(name, RecordedSpan())

    monkeypatch.setattr(calls_module, "span", span)
    nothing: Any = SimpleNamespace()
    launcher = Launcher(nothing, nothing, PlacingCalls(), nothing, nothing, nothing)
    stream: Any = SimpleNamespace(
        session=SimpleNamespace(token_ids=[1, 2], attempt=1),
        job=JOB,
        prompt=Prompt(packed_ids=b"", num_tokens=5, max_tokens=9),
        failed=[WorkerId("w0")],
        reservation="r0",
    )
    assert await launcher._place(stream) == PLACED
    assert spans["place"].attributes["tokenmesh.placed_because"] == "cost"
    assert spans["place"].events


class AnsweringBus:
    """Yields one placement."""

    def __init__(self) -> None:
        self.is_read_to_the_end = False

    async def converse(self, *_: object, **__: object) -> AsyncIterator[Placed]:
        yield PLACED
        self.is_read_to_the_end = True


async def test_the_answers_to_a_placement_are_read_to_the_end() -> None:
    bus, members = AnsweringBus(), Members(MembershipView(4, 100))
    nothing = cast("Any", None)
    calls = ServiceCalls(cast("Any", bus), GatewaySettings(), members, list, nothing, Metrics())
    place = Place(request_id=JOB.request_id, model=JOB.card.name, num_tokens=1, max_tokens=1)
    assert await calls.place(place, now_s() + 5) is PLACED
    assert bus.is_read_to_the_end
