"""A rank that dies or stands still ends its group within two seconds, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny

DETECTION_S = 2.0
SLACK_S = 1.5
"""More time, on a machine whose cores other tests use."""


class Group:
    """A leader and its follower."""

    def __init__(self, process: "subprocess.Popen[str]", phase: str) -> None:
        self.process = process
        self.follower = int(self.line("follower").split()[1])
        if phase != "load":
            self.line("loaded")
        if phase in ("prefill", "decode"):
            self.tokens = self.line("tokens")

    def line(self, start: str) -> str:
        """The next line that begins so; others are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"the leader has ended: {self.process.wait()}")


@contextmanager
def group(directory: Path, phase: str, *stages: str) -> Iterator[Group]:
    command = [
        sys.executable,
        "-m",
        "tests.fakes.rank_leader",
        str(directory),
        "1.5",
        phase,
        *stages,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Group(process, phase)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_there(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    return False


def wait_until_gone(process: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while is_there(process):
        assert time.monotonic() < deadline, f"process {process} still runs"
        time.sleep(0.01)


def phases(*quick: str) -> list[object]:
    every = ("load", "idle", "prefill", "decode")
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in every]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", phases("decode"))
def test_a_follower_that_is_killed_ends_the_leader(tiny: Tiny, phase: str) -> None:
    with group(tiny("llama").directory, phase) as ranks:
        os.kill(ranks.follower, signal.SIGKILL)
        assert ranks.process.wait(DETECTION_S + SLACK_S) != 0
        wait_until_gone(ranks.follower, SLACK_S)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", phases("decode")[1:])
def test_a_follower_that_stands_still_ends_the_leader(tiny: Tiny, phase: str) -> None:
    with group(tiny("llama").directory, phase) as ranks:
        os.kill(ranks.follower, signal.SIGSTOP)
        assert ranks.process.wait(DETECTION_S + SLACK_S) == 1
        # it dies with its parent, although it cannot run
        wait_until_gone(ranks.follower, SLACK_S)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", phases())
def test_a_leader_that_is_killed_ends_its_followers(tiny: Tiny, phase: str) -> None:
    with group(tiny("llama").directory, phase) as ranks:
        ranks.process.kill()
        wait_until_gone(ranks.follower, DETECTION_S + SLACK_S)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", phases()[1:])
def test_a_leader_that_stands_still_loses_its_followers_and_ends_when_it_goes_on(
    tiny: Tiny, phase: str
) -> None:
    with group(tiny("llama").directory, phase) as ranks:
        os.kill(ranks.process.pid, signal.SIGSTOP)
        wait_until_gone(ranks.follower, DETECTION_S + SLACK_S)
        os.kill(ranks.process.pid, signal.SIGCONT)
        assert ranks.process.wait(DETECTION_S) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_stage_that_ends_or_stands_still_ends_the_worker(
    tiny: Tiny, number: signal.Signals
) -> None:
    directory = tiny("llama").directory
    (expected,) = EngineDriver(directory).tokens([Job(list(range(3, 8)), greedy(30))])
    with group(directory, "decode", "stages") as ranks:
        assert ranks.tokens.split()[1:] == [str(each) for each in expected]
        os.kill(ranks.follower, number)
        assert ranks.process.wait(DETECTION_S + SLACK_S) != 0
        wait_until_gone(ranks.follower, SLACK_S)


@pytest.mark.timeout(60)
def test_processes_compute_what_one_does(tiny: Tiny) -> None:
    """The ranks of other tests are threads."""
    directory = tiny("llama").directory
    (expected,) = EngineDriver(directory).tokens([Job(list(range(3, 8)), greedy(30))])
    with group(directory, "decode") as ranks:
        assert ranks.tokens.split()[1:] == [str(each) for each in expected]
