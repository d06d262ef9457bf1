"""`tokenmesh up` as a user runs it: a process that takes signals, its output in a file."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

READY_S = 120.0
STOP_S = 30.0
POLL_S = 0.05


class MeshProcess:
    """One `tokenmesh up` and all that it started."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(tempfile.mkstemp(prefix="up-", suffix=".log")[1])
        command = [sys.executable, "-m", "tokenmesh", "up", "--port", str(port), *arguments]
        with self.log.open("wb") as log:
            self.process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        """Return all that it has shown."""
        return self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """Everything that it started and that runs now."""
        return list(self.process.children(recursive=True))

    def service(self, name: str) -> psutil.Process:
        """The process of a service or server; `redis-server` may be a Valkey."""
        names = ("redis-server", "valkey-server") if name == "redis-server" else (name,)
        for child in self.process.children():
            if child.status() == psutil.STATUS_ZOMBIE:
                continue
            # These two replace their arguments by a title.
            words = " ".join(child.cmdline()).split()
            if words and (not set(names).isdisjoint(words) or words[0].endswith(names)):
                return child
        raise LookupError(name)

    def wait_workers(self, count: int) -> list[psutil.Process]:
        """The processes of so many workers, once the gateway has heard from all of them."""
        give_up = time.monotonic() + READY_S
        while self._num_heard("worker") != count:
            assert time.monotonic() < give_up, self.output
            time.sleep(POLL_S)
        return [each for each in self.process.children() if "worker" in each.cmdline()]

    def _num_heard(self, service: str) -> int:
        try:
            processes = httpx.get(f"{self.url}/mesh").json()["processes"]
        except httpx.TransportError:
            return 0
        return sum(each["service"] == service for each in processes)

    def wait_ready(self) -> None:
        """Return when the whole screen is there; fails with the output otherwise."""
        give_up = time.monotonic() + READY_S
        # The command to try is its end, and an empty line ends it.
        while "\n\n" not in self.output.partition("TokenMesh is ready")[2].partition("curl ")[2]:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up, self.output
            time.sleep(POLL_S)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return int(self.process.wait(STOP_S))

    def kill(self) -> list[str]:
        """SIGKILL to it alone; the names of what outlives it, which is then killed as well."""
        family = self.family() if self.process.is_running() else []
        if self.process.is_running():
            self.process.kill()
        self.process.wait(STOP_S)
        left = alive(family)
        for process in family:
            if process.is_running():
                process.kill()
        self.log.unlink(missing_ok=True)
        return left


@contextmanager
def mesh(port: int, *arguments: str) -> Iterator[MeshProcess]:
    """A mesh that is ready, and is killed afterwards, which leaves no process behind."""
    running = MeshProcess(port, *arguments)
    try:
        running.wait_ready()
        yield running
    finally:
        left = running.kill()
    assert left == [], "these outlived their parent"


def chat(url: str, text: str, **fields: object) -> httpx.Response:
    """The answer to one chat request."""
    message = {"role": "user", "content": text}
    body = {"model": "tokenmesh-demo", "messages": [message], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)


def cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    """The time that each of them has computed so far."""
    return [each.cpu_times().user for each in processes]


def busiest(processes: list[psutil.Process], before: list[float]) -> psutil.Process:
    """The one that has computed most since `before`, which `cpu_seconds` returned."""
    spent = [now - then for now, then in zip(cpu_seconds(processes), before, strict=True)]
    return processes[spent.index(max(spent))]


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those of them that still run."""
    _, left = psutil.wait_procs(processes, timeout=5)
    return [process.name() for process in left if process.status() != psutil.STATUS_ZOMBIE]
