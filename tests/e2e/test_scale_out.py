"""`tokenmesh up` with several gateways on one port and several models."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.mesh_process import MeshProcess, mesh
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.config.loader import DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CONFIG = f"""
[[models]]
model = "{DEMO_MODEL}"
served_model_name = ["first"]
[[models]]
model = "{DEMO_MODEL}"
served_model_name = ["second", "other"]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    config: Path = tmp_path_factory.mktemp("config") / "mesh.toml"
    config.write_text(CONFIG)
    flags = ("--config", str(config), "--engine", "sim", "--gateways", "2", "--enable-admin-routes")
    with mesh(free_port(), *flags) as process:
        yield process


def gateways(url: str) -> set[str]:
    """The ids of the gateways that answer 64 connections."""
    answers = [httpx.get(f"{url}/readyz") for _ in range(64)]
    return {each.json()["gateway"] for each in answers if each.status_code == 200}


def test_both_gateways_answer_on_the_port_when_up_says_ready(running: MeshProcess) -> None:
    assert len(gateways(running.url)) == 2


def test_each_model_answers_by_every_name(running: MeshProcess) -> None:
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert {"first", "second", "other"} <= {each["id"] for each in listed}
    for name in ("first", "second", "other"):
        body = {"model": name, "prompt": "Hi", "max_tokens": 4}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_gateway_that_dies_leaves_the_port_to_the_other_and_comes_back(
    running: MeshProcess,
) -> None:
    before = gateways(running.url)
    running.service("gateway").kill()
    give_up = time.monotonic() + 60
    while True:
        try:
            now = gateways(running.url)
        except httpx.TransportError:  # a connection that the dead one had not taken yet
            now = set()
        if len(now) == 2 and now != before:
            return
        assert time.monotonic() < give_up, running.output
        time.sleep(0.2)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmesh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_worker_that_is_drained_leaves_and_stays_away(running: MeshProcess) -> None:
    state = json.loads(cli("top", "--once", "--json", "--url", running.url).stdout)
    (worker,) = [each["id"] for each in state["processes"] if each["models"] == ["second"]]
    unknown = cli("drain", f"{worker}0", "--url", running.url)
    assert (unknown.returncode, worker in unknown.stderr) == (2, True)
    drained = cli("drain", worker, "--url", running.url)
    assert drained.returncode == 0, drained.stderr
    give_up = time.monotonic() + 20
    while "was drained and is not restarted" not in running.output:
        assert time.monotonic() < give_up, running.output
        time.sleep(0.1)
    time.sleep(1.0)
    shown = cli("top", "--once", "--url", running.url).stdout
    assert "second" not in shown
    assert "first" in shown
