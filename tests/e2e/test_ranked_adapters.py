"""Adapters of a model over two ranks, by HTTP: answers of one rank, also when a rank dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.mesh_process import MeshProcess, busiest, cpu_seconds, mesh
from tests.e2e.test_ranks_survive import rank_of, stream
from tests.fakes.adapters import AdapterSpec, write_adapter
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.demo_model import PATH as DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMES: Final = ("sql", "law", "tokenmesh-demo")
SIZE: Final = 4.0
"""The demo model knows its texts by heart; an adapter that changes it less changes nothing."""
LAYERS: Final[dict[str, AdapterSpec]] = {
    "sql": AdapterSpec(seed=1, size=SIZE),
    "law": AdapterSpec(seed=2, modules=("q_proj", "o_proj", "down_proj"), rank=7, size=SIZE),
}
"""One changes all layers; the other one has a rank that two ranks cannot divide."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = (
        tmp_path_factory.mktemp("adapters"),
        AutoModelForCausalLM.from_pretrained(DEMO_MODEL),
    )
    for name, spec in LAYERS.items():
        write_adapter(model, folder / name, spec)
    return folder


def flags(adapters: Path) -> list[str]:
    named = [f"{name}={adapters / name}" for name in LAYERS]
    return [
        *("--enable-lora", "--lora-modules", *named, "--dtype", "float32"),
        *("--enable-admin-routes", "--lora-allowed-dirs", str(adapters)),
    ]


def answers(url: str) -> list[Any]:
    """Greedy and seeded answers of each adapter and of the model."""
    found = []
    for name in NAMES:
        for temperature in (0.0, 2.0):
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": 24, "seed": 5}
            given = {**body, "temperature": temperature, "ignore_eos": True}
            response = httpx.post(f"{url}/v1/completions", json=given, timeout=60.0)
            assert response.status_code == 200, response.text
            assert response.json()["model"] == name
            found.append(response.json()["choices"][0]["text"])
    return found


@pytest.fixture(scope="module")
def expected(adapters: Path) -> list[Any]:
    """Return what one rank answers."""
    with mesh(free_port(), *flags(adapters)) as alone:
        found = answers(alone.url)
    assert len(set(found[1::2])) == len(NAMES), "each adapter changes what the model says"
    return found


@pytest.fixture(scope="module")
def two(adapters: Path) -> Iterator[MeshProcess]:
    """Two workers of two ranks each."""
    with mesh(free_port(), "--workers", "2", "-tp", "2", *flags(adapters)) as running:
        running.wait_workers(2)
        yield running


def models(url: str) -> set[str]:
    return {each["id"] for each in httpx.get(f"{url}/v1/models", timeout=30.0).json()["data"]}


def test_answers_are_those_of_one_rank(two: MeshProcess, expected: list[Any]) -> None:
    assert models(two.url) == set(NAMES)
    for _ in range(2):  # by both workers
        assert answers(two.url) == expected


def test_an_adapter_is_loaded_and_unloaded_on_all_ranks(
    two: MeshProcess, expected: list[Any], adapters: Path
) -> None:
    def post(what: str, **body: str) -> httpx.Response:
        return httpx.post(f"{two.url}/v1/{what}_lora_adapter", json=body, timeout=60.0)

    assert post("unload", lora_name="law").status_code == 200
    assert models(two.url) == set(NAMES) - {"law"}
    refused = post("load", lora_name="none", lora_path=str(adapters / "none"))
    assert 400 <= refused.status_code < 500, refused.text
    assert "none" not in models(two.url)
    loaded = post("load", lora_name="law", lora_path=str(adapters / "law"))
    assert loaded.status_code == 200, loaded.text
    assert answers(two.url) == expected


def test_a_stream_with_an_adapter_outlives_a_rank(two: MeshProcess, expected: list[Any]) -> None:
    workers = two.wait_workers(2)
    with httpx.Client(base_url=two.url, timeout=60.0) as client:
        with stream(client, model="sql") as texts:
            whole = "".join(texts)
        before = cpu_seconds(workers)
        with stream(client, model="sql") as texts:
            text = "".join(next(texts) for _ in range(20))
            worker = busiest(workers, before)
            follower = rank_of(worker)
            os.kill(follower.pid, signal.SIGKILL)
            text += "".join(texts)
        assert text == whole
        assert worker.wait(10) != 0
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    # the one that started again has both adapters on both of its ranks, and is alone for a while
    again = two.wait_workers(2)
    (other,) = {each.pid for each in again} & {each.pid for each in workers}
    os.kill(rank_of(psutil.Process(other)).pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(other)], timeout=10)
    assert answers(two.url) == expected
