"""A background response survives the death of processes of `tokenmesh up`."""

import json
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.mesh_process import MeshProcess, busiest, cpu_seconds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

REQUEST: dict[str, Any] = {
    "model": "tokenmesh-demo",
    "input": "Tell me something.",
    "seed": 3,
    "temperature": 0.8,
    "ignore_eos": True,
    "max_output_tokens": 300,
}


def read_events(url: str, response_id: str, after: int) -> list[dict[str, Any]]:
    """All later events, requested until the gateway is back."""
    query: dict[str, str | int] = {"stream": "true", "starting_after": after}
    path = f"{url}/v1/responses/{response_id}"
    give_up = time.monotonic() + 60
    while True:
        try:
            text = httpx.get(path, params=query, timeout=60).text
        except httpx.TransportError:
            assert time.monotonic() < give_up
            time.sleep(0.1)
            continue
        lines = [line for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")


@pytest.mark.parametrize("victim", ["gateway", "nats-server", "worker", "redis-server"])
def test_a_background_response_survives(demo_mesh: MeshProcess, victim: str) -> None:
    uninterrupted = httpx.post(f"{demo_mesh.url}/v1/responses", json=REQUEST, timeout=60).json()
    body = {**REQUEST, "background": True, "stream": True}
    workers = demo_mesh.wait_workers(2)
    before = cpu_seconds(workers)
    seen: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{demo_mesh.url}/v1/responses", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == 20:
                break
    is_worker = victim == "worker"
    (busiest(workers, before) if is_worker else demo_mesh.service(victim)).kill()
    rest = read_events(demo_mesh.url, seen[0]["response"]["id"], seen[-1]["sequence_number"])
    events = seen + rest
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 300
    assert text_of(events) == uninterrupted["output"][0]["content"][0]["text"]
    if is_worker:
        wait_whole_trace(demo_mesh.url, seen[0]["response"]["id"])


def wait_whole_trace(url: str, response_id: str) -> None:
    """Return when the spans of a response that has moved are one tree, without a gap."""
    give_up = time.monotonic() + 60
    while True:
        answer = httpx.get(f"{url}/traces/{response_id}", timeout=60)
        spans = answer.json()["spans"] if answer.is_success else []
        known = {each["span_id"] for each in spans}
        above = [each["parent_id"] for each in spans]
        names = Counter(each["name"] for each in spans if each["service"] == "gateway")
        is_tree = above.count(None) == 1 and set(above) - {None} <= known
        if is_tree and names["place"] == 2 and any(s["name"] == "worker.decode" for s in spans):
            return
        assert time.monotonic() < give_up, spans
        time.sleep(0.1)
