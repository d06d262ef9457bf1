"""300 faults of ranks: each ends its group within two seconds, and leaves nothing behind."""

import os
import signal
import sys
import time
from random import Random
from typing import Final

import psutil
import pytest

from tests.engine.test_rank_death import SLACK_S, Group, group, is_there
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHUNKS: Final = 30
FAULTS: Final = ("kill", "kill leader", "stop", "stop", "slow") * 2
"""A chunk has all of these, in random order."""
DETECTION_S: Final = 2.0
SLOW_S: Final = 2.0
RUNS_S, STANDS_S = 0.01, 0.1
"""A rank that is ten times slower."""
detected_s: list[float] = []
"""Seconds from each fault to the end of another rank, in this process so far."""


def ended_after(ranks: Group, process: int, number: int) -> float:
    """Send a signal to a rank; seconds until another one has ended."""
    other = ranks.process.pid if process == ranks.follower else ranks.follower
    began_s = time.monotonic()
    os.kill(process, number)
    while is_there(other):
        assert time.monotonic() - began_s < DETECTION_S + SLACK_S, "no rank has noticed"
        if other == ranks.process.pid:
            ranks.process.poll()
        time.sleep(0.005)
    return time.monotonic() - began_s


def slow_down(ranks: Group) -> None:
    """Let a rank stand still most of the time; its group goes on."""
    until_s = time.monotonic() + SLOW_S
    while time.monotonic() < until_s:
        for number, wait_s in ((signal.SIGSTOP, STANDS_S), (signal.SIGCONT, RUNS_S)):
            os.kill(ranks.follower, number)
            time.sleep(wait_s)
    assert ranks.process.poll() is None


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_faults_are_noticed_and_leave_nothing(tiny: Tiny, chunk: int) -> None:
    rng, directory = Random(chunk), tiny("llama").directory
    (expected,) = EngineDriver(directory).tokens([Job(list(range(3, 8)), greedy(30))])
    sizes = ("stages",) if chunk % 2 else ()
    for fault in rng.sample(FAULTS, len(FAULTS)):
        with group(directory, "decode", *sizes) as ranks:
            family = [ranks.process.pid, ranks.follower]
            time.sleep(rng.random() * 0.2)
            if fault == "slow":
                slow_down(ranks)
                words = ranks.line("tokens").split()[1:]
                assert words == [str(each) for each in expected]
            elif fault == "kill leader":
                detected_s.append(ended_after(ranks, ranks.process.pid, signal.SIGKILL))
            else:
                number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
                detected_s.append(ended_after(ranks, ranks.follower, number))
        gone_by_s = time.monotonic() + SLACK_S
        while any(map(is_there, family)):
            assert time.monotonic() < gone_by_s, "a rank is left"
            time.sleep(0.01)
        held = {each.pid for each in psutil.net_connections("inet") if each.pid is not None}
        assert held.isdisjoint(family), "a port is left"


def test_faults_are_noticed_within_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    if not detected_s:
        pytest.skip("no faults were made in this process")
    ordered = sorted(detected_s)
    shown = {
        share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for share in (0.5, 0.9, 0.99)
    }
    rounded = {share: round(value, 3) for share, value in shown.items()}
    with capsys.disabled():
        sys.stdout.write(f"\n{len(ordered)} faults were noticed after {rounded} s\n")
    assert shown[0.99] <= DETECTION_S
