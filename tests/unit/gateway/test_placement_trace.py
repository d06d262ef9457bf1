"""Every placement is in the trace with what it was made from, that of a recovery too."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmesh.services.gateway.mesh import launcher as launcher_module
from tokenmesh.services.gateway.mesh.launcher import Launcher
from tokenmesh.services.gateway.mesh.placement_trace import trace_placement
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Place, Placed
from tokenmesh.shared.messages.place import Candidate

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


def test_worker_reason_and_candidates_with_their_scores_are_told() -> None:
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


async def test_a_recovery_traces_its_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: dict[str, RecordedSpan] = {}

    @contextmanager
    def span(name: str, *_: object, **__: object) -> Iterator[RecordedSpan]:
        yield spans.setdefault(name, RecordedSpan())

    async def place(_message: Place, _deadline_s: float) -> Placed:
        return PLACED

    monkeypatch.setattr(launcher_module, "span", span)
    nothing: Any = SimpleNamespace()
    launcher = Launcher(nothing, nothing, nothing, nothing, nothing, nothing)
    launcher._calls = SimpleNamespace(place=place)  # type: ignore[assignment]
    stream: Any = SimpleNamespace(
        session=SimpleNamespace(token_ids=[1, 2], attempt=1),
        place=Place(request_id=RequestId("r"), model=ModelName("m"), num_tokens=5, max_tokens=9),
        failed=[WorkerId("w0")],
        reservation="r0",
        deadline_s=0.0,
        generate=SimpleNamespace(request_id="r"),
    )
    assert await launcher._place(stream) == PLACED
    assert spans["place"].attributes["tokenmesh.placed_because"] == "cost"
    assert spans["place"].events
