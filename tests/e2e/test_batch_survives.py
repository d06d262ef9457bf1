"""A batch survives the death of processes of `tokenmesh up`."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.mesh_process import MeshProcess, busiest, cpu_seconds

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

NUM_LINES = 24
_GIVE_UP_S = 90.0


def body_of(number: int) -> dict[str, Any]:
    return {
        "model": "tokenmesh-demo",
        "prompt": "Once upon a time",
        "seed": number,
        "temperature": 0.8,
        "ignore_eos": True,
        "max_tokens": 64,
    }


def create(url: str) -> str:
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body_of(n)}
        for n in range(NUM_LINES)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    made = httpx.post(
        f"{url}/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"}
    ).json()
    request = {
        "input_file_id": made["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return str(httpx.post(f"{url}/v1/batches", json=request).json()["id"])


def wait(url: str, batch_id: str, num_answers: int) -> dict[str, Any]:
    """The batch once it has so many answers; asked again while the gateway is away."""
    give_up = time.monotonic() + _GIVE_UP_S
    while True:
        assert time.monotonic() < give_up
        try:
            batch: dict[str, Any] = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=30).json()
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        is_over = batch["status"] == "completed" or num_answers < NUM_LINES
        if is_over and batch["request_counts"]["completed"] >= num_answers:
            return batch
        time.sleep(0.05)


def test_a_batch_survives_a_worker_and_its_gateway(demo_mesh: MeshProcess) -> None:
    url = demo_mesh.url
    workers = demo_mesh.wait_workers(2)
    before = cpu_seconds(workers)
    batch_id = create(url)
    wait(url, batch_id, 2)
    busiest(workers, before).kill()
    early = wait(url, batch_id, 6)
    assert early["status"] == "in_progress", "the batch ended before its gateway could be killed"
    demo_mesh.service("gateway").kill()
    batch = wait(url, batch_id, NUM_LINES)
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    content = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=30).text
    answers = {each["custom_id"]: each for each in map(json.loads, content.splitlines())}
    assert len(answers) == len(content.splitlines()) == NUM_LINES
    for number in (0, NUM_LINES - 1):
        again = httpx.post(f"{url}/v1/completions", json=body_of(number), timeout=30).json()
        answer = answers[f"r{number}"]["response"]["body"]
        assert answer["choices"][0]["text"] == again["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 64
