"""`tokenmesh up -tp 2`: one command, and streams that outlive the death of a rank."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.e2e.mesh_process import busiest, cpu_seconds, mesh
from tokenmesh.cli.embedded.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BODY = {
    "model": "tokenmesh-demo",
    "prompt": "Once upon a time",
    "max_tokens": 300,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@contextmanager
def stream(client: httpx.Client, **other: str) -> Iterator[Iterator[str]]:
    """The texts of one completion as they arrive."""
    with client.stream("POST", "/v1/completions", json={**BODY, **other}) as response:
        assert response.status_code == 200

        def texts() -> Iterator[str]:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (choice["text"] for choice in event["choices"])

        yield texts()


def rank_of(worker: psutil.Process) -> psutil.Process:
    """The process of the rank that follows this worker."""
    module = "tokenmesh.engine.exec.follower"
    (follower,) = (each for each in worker.children() if module in each.cmdline())
    return follower


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (signal.SIGKILL, "-tp"),
        pytest.param(signal.SIGSTOP, "-tp", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "-pp", marks=pytest.mark.slow),
    ],
)
def test_a_stream_goes_on_with_the_same_tokens_when_a_rank_ends(
    number: signal.Signals, size: str
) -> None:
    flags = ("--workers", "2", size, "2")
    with (
        mesh(free_port(), *flags) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as client,
    ):
        workers = running.wait_workers(2)
        with stream(client) as texts:
            expected = "".join(texts)
        (entry,) = client.get("/v1/models").json()["data"]
        sizes = entry["parallel_config"]
        assert sizes == {
            "tensor_parallel_size": 2 if size == "-tp" else 1,
            "pipeline_parallel_size": 2 if size == "-pp" else 1,
        }
        measured = [
            line.rsplit(" ", 1)
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("tokenmesh:rank")
        ]
        ranks = [float(value) for name, value in measured if name.startswith("tokenmesh:ranks{")]
        assert ranks == [2, 2]
        what = "rank_sum_seconds" if size == "-tp" else "rank_wait_seconds"
        sums = [float(value) for name, value in measured if what in name]
        assert sum(each > 0 for each in sums) >= 2
        before = cpu_seconds(workers)
        with stream(client) as texts:
            text = "".join(next(texts) for _ in range(20))
            worker = busiest(workers, before)
            follower = rank_of(worker)
            os.kill(follower.pid, number)
            text += "".join(texts)
        assert text == expected
        assert worker.wait(10) != 0
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
        # it starts again, whole
        again = running.wait_workers(2)
        assert {each.pid for each in again} != {each.pid for each in workers}
