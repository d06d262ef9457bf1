"""`tokenmesh up A B --on-demand`: one model at a time is awake, whatever dies."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh_process import mesh
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.demo_model import PATH as DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

WAIT_S = 60.0


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_two_models_take_turns_and_survive_the_death_of_a_worker(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    models = [str(folder) for folder in folders]
    flags = ("--on-demand", "--keep-alive", "-1")
    with (
        mesh(free_port(), *models, *flags) as running,
        httpx.Client(base_url=running.url, timeout=WAIT_S) as client,
    ):
        running.wait_workers(2)

        def answer(model: str) -> httpx.Response:
            message = {"role": "user", "content": "What is 17 + 25?"}
            return client.post("/v1/chat/completions", json={"model": model, "messages": [message]})

        def awake() -> list[str]:
            return [each["name"] for each in client.get("/api/ps").json()["models"]]

        def text(model: str) -> str:
            response = answer(model)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["message"]["content"])

        for model in (*models, models[0]):
            assert text(model) == "17 + 25 = 42"
            wait_until(lambda: awake() == [model])  # noqa: B023
        assert {each["id"] for each in client.get("/v1/models").json()["data"]} == set(models)
        table = subprocess.run(
            [sys.executable, "-m", "tokenmesh", "ps", "--url", running.url],
            env={**os.environ, "COLUMNS": "240"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert ("1 up" in table, "1 asleep" in table) == (True, True)
        spans = trace_of(client, answer(models[1]).headers["x-request-id"])
        assert "wake" in {span["name"] for span in spans}

        # the worker that is awake holds the one slot; its end releases it
        for worker in running.wait_workers(2):
            worker.kill()
        wait_until(lambda: answer(models[0]).status_code == 200)
        assert text(models[1]) == "17 + 25 = 42"


def trace_of(client: httpx.Client, request_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def has_come() -> bool:
        response = client.get(f"/traces/{request_id}")
        if response.status_code == 200:
            found[:] = json.loads(response.text)["spans"]
        return any(span["name"] == "http" for span in found)

    wait_until(has_come)
    return found
