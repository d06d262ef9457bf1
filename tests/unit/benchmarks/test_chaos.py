"""The chaos program: it hears wrong tokens, knows what a gap came from, ends what it starts."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from benchmarks.chaos_run.child import Child
from benchmarks.chaos_run.completions import SEED, Completions
from benchmarks.chaos_run.faults import Fault, draw
from benchmarks.chaos_run.gaps import by_fault, by_kind, guided_ratio, spread
from benchmarks.chaos_run.longest import longest_silences
from benchmarks.chaos_run.received import Gap, ReceivedChoice, ReceivedResponse
from benchmarks.chaos_run.streams import Streams
from benchmarks.serve.sim_oracle import SimOracle
from tests.fakes.processes import still_running
from tests.fakes.scripted_http import DONE, Answer, event, serving, stream
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.embedded.child import ChildSpec, Phase
from tokenmesh.shared.ids import SeedSource

ORACLE = SimOracle({300 + index: f" {letter}" for index, letter in enumerate("abcdefgh")})
Spoil = Callable[[list[str]], list[str]]
Event = dict[str, Any]


def choice_event(index: int, text: str, finish: str | None, logged: list[str] | None) -> Event:
    logprobs = None if logged is None else {"tokens": logged}
    fields = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
    return {"choices": [fields]}


def right_server(spoil: Spoil) -> Answer:
    """Says what the oracle expects of every choice, after `spoil` has gone over its tokens."""
    source = SeedSource(SEED)

    def answer(_path: str, body: dict[str, object]) -> bytes:
        prompt, num_choices, length = body["prompt"], body["n"], body["max_tokens"]
        assert isinstance(prompt, list)
        assert isinstance(num_choices, int)
        assert isinstance(length, int)
        stop = body["stop"]
        seed = int(str(body["seed"])) if "seed" in body else source.draw()
        events: list[Event] = []
        num_tokens = 0
        for index in range(num_choices):
            text = ORACLE.text(prompt, seed + index, length)
            before, found, _ = text.partition(str(stop)) if stop else (text, "", "")
            num_tokens += (len(before) + len(found)) // 2
            tokens = spoil([before[at : at + 2] for at in range(0, len(before), 2)])
            logged = tokens if body["logprobs"] is not None else None
            events.append(choice_event(index, "".join(tokens), "length", logged))
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        return stream([*map(event, events), event({"choices": [], "usage": usage}), DONE])

    return answer


async def faults_of(spoil: Spoil) -> set[str]:
    async with serving(right_server(spoil)) as url:
        request_kind = Completions({"": [Target(url, None)]}, "m", ORACLE, Random(1))
        streams = Streams({request_kind: 1}, Random(1), timeout_s=5)
        await streams.run(2, lambda: len(streams.received) < 20)
    return set(streams.faults)


async def test_right_streams_have_no_fault() -> None:
    assert await faults_of(lambda tokens: tokens) == set()


@pytest.mark.parametrize(
    "spoil", [lambda tokens: tokens[1:], lambda tokens: tokens + tokens[-1:]], ids=["lost", "twice"]
)
async def test_wrong_tokens_are_heard(spoil: Spoil) -> None:
    assert await faults_of(spoil) <= {"Completions: wrong_text", "Completions: wrong_logged"}
    assert await faults_of(spoil)


def test_every_kind_of_fault_comes_in_turn_and_follows_from_the_seed() -> None:
    drawn = draw(Random(7), 150)
    assert drawn == draw(Random(7), 150)
    assert drawn != draw(Random(8), 150)
    once = set(drawn[:74])
    assert {("freeze", "scheduler"), ("kill", "nats"), ("terminate", "worker")} <= once
    assert {("kill", "responder"), ("long outage", "redis")} <= once


def test_a_gap_counts_for_the_fault_that_was_on() -> None:
    shown = ReceivedChoice({}, gaps=[Gap(1.0, 1.2, 0), Gap(10.4, 10.9, 0), Gap(12.0, 12.3, 0)])
    faults = [
        Fault("kill", "worker", 10.5, 13.0),
        Fault("freeze", "worker", 11.0, 12.1),
        Fault("nothing", "any process", 10.0, 20.0),
    ]
    found = by_fault([ReceivedResponse(0.0, 0, 0.5, choices=[shown])], faults)
    assert {label: each["max_ms"] for label, each in found.items()} == {
        "kill worker": 500.0,
        "freeze worker": 0.0,
        "nothing any process": 0.0,
        "several at once": 300.0,
        "no fault": 200.0,
        "no fault (start)": 500.0,
    }


def test_gaps_of_constrained_streams_are_compared_with_those_of_plain_ones() -> None:
    def streams(kind: str, gap_s: float, count: int) -> ReceivedResponse:
        gaps = [Gap(0.0, 0.06, 0), Gap(1.0, 1.0 + gap_s, 0)]
        return ReceivedResponse(
            0.0, kind=kind, choices=[ReceivedChoice({}, gaps=gaps) for _ in range(count)]
        )

    received = [streams("plain", 0.1, 100), streams("guided", 0.4, 100), streams("stop", 9.0, 100)]
    assert by_kind(received)["guided"] == spread([0.4] * 100)
    assert guided_ratio(by_kind(received)) == pytest.approx(4.0)
    assert guided_ratio(by_kind([*received[1:], streams("plain", 0.1, 99)])) is None
    assert (
        by_kind([ReceivedResponse(0.0, kind="plain", choices=[ReceivedChoice({})])])["plain"][
            "max_ms"
        ]
        == 0.0
    )


def test_the_longest_silences_come_with_their_faults_and_the_ids_of_their_traces() -> None:
    shown = ReceivedChoice({}, gaps=[Gap(11.0, 11.2, 0), Gap(14.0, 14.9, 0)])
    received = [
        ReceivedResponse(10.0, kind="guided", response_id="a", choices=[shown]),
        ReceivedResponse(
            10.5,
            kind="plain",
            response_id="b",
            choices=[ReceivedChoice({}, gaps=[Gap(12.0, 12.3, 0)])],
        ),
    ]
    faults = [Fault("kill", "worker", 13.5, 14.5), Fault("freeze", "redis", 15.0, 16.0)]
    longest, *others = longest_silences(received, faults)
    assert longest == {
        "ms": 900.0,
        "kind": "guided",
        "response_id": "a",
        "at_s": 4.0,
        "meanwhile": ["kill worker 3.50 to 4.50"],
    }
    assert [(each["ms"], each["meanwhile"]) for each in others] == [(300.0, []), (200.0, [])]
    assert longest_silences([], faults) == []


def test_percentiles_of_few_and_none() -> None:
    assert spread([0.2, 0.1])["p99_ms"] == 200.0
    assert spread([]) == {"count": 0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}


async def test_a_child_that_does_not_become_ready_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no such thing')")
    child = Child(ChildSpec("worker 1", command, Phase.MESH), tmp_path)
    await child.start()
    with pytest.raises(RuntimeError, match="no such thing"):
        await child.wait_ready()


async def test_children_die_when_the_program_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, uvloop\n"
        "from pathlib import Path\n"
        "from benchmarks.chaos_run.child import Child\n"
        "from tokenmesh.cli.embedded.child import ChildSpec, Phase\n"
        "async def main():\n"
        "    sleep = (sys.executable, '-c', 'import time; time.sleep(60)')\n"
        "    child = Child(ChildSpec('redis', sleep, Phase.SERVER), Path(sys.argv[1]))\n"
        "    await child.start(); print(child.groups[0], flush=True); await asyncio.sleep(60)\n"
        "uvloop.run(main())"
    )
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    orphan = psutil.Process(int(await program.stdout.readline()))
    program.kill()
    await program.wait()
    assert still_running([orphan]) == []


async def test_a_child_that_stays_is_killed(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    child = Child(ChildSpec("worker 1", command, Phase.MESH), tmp_path)
    await child.start()
    assert not await child.wait_end(0.1)
    await asyncio.sleep(0)
    assert not psutil.pid_exists(child.groups[0])
