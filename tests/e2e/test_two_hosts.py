"""The guide to several hosts, with two network namespaces in their place: only one has a mesh.

Where these are not permitted, both agents of torchrun run on one host.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.mesh_process import chat, mesh
from tests.servers import _nats_program, _redis_program, free_port
from tokenmesh.cli.embedded.ports import free_port as any_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDE = ROOT / "docs/guides/more-than-one-device.md"
FIRST, SECOND = "10.213.7.1", "10.213.7.2"
READY_S = 120.0
ASK = (
    "import sys, httpx; print(httpx.request(*sys.argv[1:3], "
    "json=eval(sys.argv[3]), timeout=60).text)"
)
MODEL = ROOT / "tokenmesh/demo_model"
TEXT = "What is the capital of France?"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two of them with one wire between them, and no other network."""
    names = f"tm{os.getpid()}a", f"tm{os.getpid()}b"
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    try:
        ip(
            "link",
            "add",
            "wire",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "wire",
            "netns",
            names[1],
        )
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


class Host:
    """Processes of one namespace, or of this host."""

    def __init__(self, name: str, folder: Path, stack: ExitStack, *, is_here: bool) -> None:
        self._name, self._folder, self._stack = name, folder, stack
        self._enter = [] if is_here else ["ip", "netns", "exec", name]

    def start(self, what: str, *words: str) -> psutil.Popen:
        """Start a process, which is killed at the end with its children."""
        log = self._stack.enter_context((self._folder / f"{self._name}-{what}.log").open("wb"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = psutil.Popen([*self._enter, *words], env=environment, stdout=log, stderr=log)
        self._stack.callback(end, process)
        return process

    def get(self, method: str, url: str, body: object = None) -> str:
        command = [*self._enter, sys.executable, "-c", ASK, method, url, repr(body)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        return made.stdout


def end(process: psutil.Popen) -> None:
    family = process.children(recursive=True) if process.is_running() else []
    for each in [process, *family]:
        if each.is_running():
            each.kill()
    process.wait(10)


def guide_lines(nats: str, redis: str, other: dict[str, str]) -> list[list[str]]:
    """The torchrun lines of the guide, for this model; other: what they say otherwise."""
    text = GUIDE.read_text().replace("\\\n", " ")
    found = re.findall(r"^torchrun --.*$", text, re.MULTILINE)
    values = {"./my-model": str(MODEL), "--nats URL": f"--nats {nats}"}
    values |= {"--redis URL": f"--redis {redis}", "FIRST_HOST": FIRST}
    values |= other
    for name, value in values.items():
        found = [line.replace(name, value) for line in found]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return [[torchrun, *shlex.split(line)[1:]] for line in found]


Hosts = AbstractContextManager[tuple[Host, list[psutil.Popen], int]]


@contextmanager
def two_hosts(
    names: tuple[str, str], folder: Path, other: dict[str, str] | None = None
) -> Iterator[tuple[Host, list[psutil.Popen], int]]:
    """The mesh of the guide; what runs the ranks of each host, and the gateway's port. other: what
    the lines of the guide say otherwise on one host."""
    nats_port, redis_port, port = free_port(), free_port(), free_port()
    nats, redis = f"nats://127.0.0.1:{nats_port}", f"redis://127.0.0.1:{redis_port}"
    with ExitStack() as stack:
        is_here = other is not None
        first, second = (Host(name, folder, stack, is_here=is_here) for name in names)
        first.start("nats", _nats_program(), "-js", "-p", str(nats_port), "-sd", str(folder / "js"))
        first.start("redis", _redis_program(), "--port", str(redis_port), "--save", "")
        of_mesh = ("--model", str(MODEL), "--nats", nats, "--redis", redis)
        for service in ("tokenizer", "scheduler"):
            first.start(service, sys.executable, "-m", "tokenmesh", "serve", service, *of_mesh)
        gateway = ("serve", "gateway", "--port", str(port), *of_mesh)
        first.start("gateway", sys.executable, "-m", "tokenmesh", *gateway)
        lines = guide_lines(nats, redis, other or {})
        assert len(lines) == 2
        ranks = [
            host.start("ranks", *line) for host, line in zip((first, second), lines, strict=True)
        ]
        yield first, ranks, port


def test_the_guide_to_two_hosts_serves_a_model(
    namespaces: tuple[str, str], expected: Any, tmp_path: Path
) -> None:
    check(two_hosts(namespaces, tmp_path), expected, "tokenmesh:stages{", tmp_path)


def test_two_agents_of_torchrun_on_one_host_serve_a_model(expected: Any, tmp_path: Path) -> None:
    other = {
        "FIRST_HOST": "127.0.0.1",
        "29500": str(any_port()),
        "--pipeline-parallel-size": "--tensor-parallel-size",
    }
    check(two_hosts(("first", "second"), tmp_path, other), expected, "tokenmesh:ranks{", tmp_path)


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return what one rank answers."""
    with mesh(any_port()) as alone:
        return chat(alone.url, TEXT, temperature=0.0, max_tokens=12).json()["choices"]


def check(hosts: Hosts, expected: Any, metric: str, folder: Path) -> None:
    """The mesh of two agents answers as one rank does; where one agent ends, so does the other."""
    with hosts as (first, ranks, port):
        url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
        while '"id"' not in first.get("GET", f"{url}/v1/models"):
            assert time.monotonic() < give_up, [each.read_text() for each in folder.glob("*.log")]
            assert all(each.poll() is None for each in ranks)
            time.sleep(0.5)
        message = {"role": "user", "content": TEXT}
        name = httpx.Response(200, text=first.get("GET", f"{url}/v1/models")).json()["data"][0][
            "id"
        ]
        body = {"model": name, "messages": [message], "temperature": 0.0, "max_tokens": 12}
        answer = first.get("POST", f"{url}/v1/chat/completions", body)
        assert httpx.Response(200, text=answer).json()["choices"] == expected
        assert metric in first.get("GET", f"{url}/metrics")
        # the second host dies, and with it the rank of the first one
        end(ranks[1])
        assert ranks[0].wait(15) != 0
