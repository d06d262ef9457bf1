"""Children are kept alive, explained when they cannot be, and never left behind."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import still_running
from tokenmesh.cli.embedded.child import Child, ChildSpec, Fork, Phase, child_environment
from tokenmesh.cli.embedded.screen import explanation, parse_line
from tokenmesh.cli.embedded.supervisor import ProcessSupervisor, pause_s
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.lifecycle import ExitCode

LIMITS = UpSettings(restart_min_s=0.01, restart_max_s=0.02, max_restarts=2)
SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('deaf', flush=True); time.sleep(60)"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
    "print(child.pid, flush=True); time.sleep(60)"
)


@dataclass
class Watched:
    """A supervisor and its output."""

    supervisor: ProcessSupervisor
    lines: list[tuple[str, str]] = field(default_factory=list)
    restarts: list[tuple[str, int]] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)

    async def line(self, is_it: Callable[[str], bool] = bool) -> str:
        """The first line of output that `is_it`."""
        while True:
            for _, text in self.lines:
                if is_it(text):
                    return text
            await asyncio.sleep(0.005)


async def test_the_others_go_on_without_a_model_that_cannot_run() -> None:
    wrong = f"raise SystemExit({int(ExitCode.BAD_CONFIG)})"
    specs = [
        ChildSpec(f"worker {n}", (sys.executable, "-c", code), Phase.MESH, model=model)
        for n, (code, model) in enumerate(((SLEEP, "A"), (wrong, "B"), (wrong, "C")))
    ]
    asked = asyncio.Event()

    def goes_on(spec: ChildSpec) -> bool:
        asyncio.get_running_loop().call_soon(asked.set)
        return spec.model == "B"

    supervisor = ProcessSupervisor(
        LIMITS, lambda _name, _line: None, lambda _death, _pause: None, goes_on_without=goes_on
    )
    try:
        await supervisor.start(specs[:2])
        await asked.wait()
        assert [spec.model for spec in supervisor.failed] == ["B"]
        assert not supervisor.dead.done()
        await supervisor.start(specs[2:])
        assert (await supervisor.dead).name == "worker 2"
    finally:
        await supervisor.stop(0.0, asyncio.Event())


def new_children(known: set[psutil.Process]) -> set[psutil.Process]:
    """Return processes that did not run before; the session's own servers are children too."""
    return set(psutil.Process().children(recursive=True)) - known


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    known = new_children(set())
    lines: list[tuple[str, str]] = []
    restarts: list[tuple[str, int]] = []
    drained: list[str] = []
    supervisor = ProcessSupervisor(
        LIMITS,
        lambda name, line: lines.append((name, line)),
        lambda death, _: restarts.append((death.name, death.exit_code)),
        drained.append,
    )
    yield Watched(supervisor, lines, restarts, drained)
    await supervisor.stop(0.0, asyncio.Event())
    assert new_children(known) == set()


def spec(code: str, name: str = "child", phase: Phase = Phase.MESH) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), phase)


def polite(name: str) -> str:
    return (
        "import signal, sys, time\n"
        "def leave(*_): print('left', flush=True); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, leave); print('{name} up', flush=True); time.sleep(60)"
    )


async def test_a_child_that_dies_is_started_again(watched: Watched, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = (
        f"import pathlib, sys, time; flag = pathlib.Path({str(flag)!r})\n"
        "if not flag.exists(): flag.touch(); sys.exit(7)\n"
        "print('second life', flush=True); time.sleep(60)"
    )
    await watched.supervisor.start([spec(code)])
    assert await watched.line() == "second life"
    assert watched.restarts == [("child", 7)]
    assert not watched.supervisor.dead.done()


async def test_a_child_that_dies_again_and_again_is_given_up_with_its_last_words(
    watched: Watched,
) -> None:
    await watched.supervisor.start([spec("import sys; print('why'); sys.exit(9)")])
    death = await watched.supervisor.dead
    assert (death.name, death.exit_code, death.tail) == ("child", 9, ("why",))
    assert len(watched.restarts) == LIMITS.max_restarts


async def test_once_the_mesh_runs_a_child_that_keeps_dying_does_not_end_it(
    watched: Watched,
) -> None:
    watched.supervisor.never_give_up()
    await watched.supervisor.start(
        [spec("import sys; sys.exit(2)", "broken"), spec(SLEEP, "healthy")]
    )
    while len(watched.restarts) < 3 * LIMITS.max_restarts:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert set(watched.restarts) == {("broken", 2)}
    assert not watched.supervisor.dead.done()
    healthy = watched.supervisor.children[1]
    assert healthy.is_running


def test_the_pause_between_restarts_grows_up_to_its_bound() -> None:
    pauses = [pause_s(UpSettings(), deaths) for deaths in (1, 2, 3, 10, 10**6)]
    assert pauses == [0.25, 0.5, 1.0, 10.0, 10.0]


async def test_a_child_that_lives_again_is_mentioned_and_its_deaths_forgotten(
    tmp_path: Path,
) -> None:
    recovered: list[tuple[str, int]] = []
    deaths: list[int] = []
    limits = LIMITS.model_copy(update={"restart_reset_s": 2.0})
    supervisor = ProcessSupervisor(
        limits,
        lambda *_: None,
        lambda death, _: deaths.append(death.in_a_row),
        on_recovered=lambda name, deaths: recovered.append((name, deaths)),
    )
    counter = tmp_path / "counter"
    code = (
        f"import pathlib, sys, time; counter = pathlib.Path({str(counter)!r})\n"
        "lives = len(counter.read_text()) if counter.exists() else 0\n"
        "counter.write_text('x' * (lives + 1))\n"
        "time.sleep(2.5 if lives == 2 else 0); sys.exit(7)"
    )
    await supervisor.start([spec(code)])
    while len(deaths) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await supervisor.stop(0.0, asyncio.Event())
    assert recovered == [("child", 2)]
    assert deaths[:3] == [1, 2, 1]


async def test_a_machine_without_room_for_a_while_costs_no_child(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = Child.start, [OSError("no room"), OSError("no room")]

    async def start_if_there_is_room(child: Child, fork: Fork | None) -> None:
        if watched.restarts and failures:
            raise failures.pop()
        await start(child, fork)

    monkeypatch.setattr(Child, "start", start_if_there_is_room)
    supervisor = watched.supervisor
    await supervisor.start([spec("import sys; print('why'); sys.exit(9)")])
    death = await supervisor.dead
    assert watched.restarts == [("child", 9), ("child", 126)]
    assert (death.exit_code, death.tail) == (126, ("it cannot be started: no room",))


async def test_a_wrong_configuration_is_not_tried_again(watched: Watched) -> None:
    await watched.supervisor.start([spec("import sys; sys.exit(2)")])
    assert (await watched.supervisor.dead).exit_code == 2
    assert watched.restarts == []


async def test_a_child_that_was_drained_stays_away(watched: Watched) -> None:
    await watched.supervisor.start([spec(f"import sys; sys.exit({ExitCode.DRAINED})")])
    while not watched.drained:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert (watched.drained, watched.restarts) == (["child"], [])
    assert not watched.supervisor.dead.done()


async def test_a_child_that_does_not_leave_is_killed_after_the_grace(watched: Watched) -> None:
    known = new_children(set())
    await watched.supervisor.start([spec(STUBBORN)])
    await watched.line()
    await asyncio.wait_for(watched.supervisor.stop(0.05, asyncio.Event()), 15)
    assert new_children(known) == set()


async def test_a_second_signal_ends_all_patience(watched: Watched) -> None:
    await watched.supervisor.start([spec(STUBBORN)])
    await watched.line()
    hurry = asyncio.Event()
    stopping = asyncio.create_task(watched.supervisor.stop(60.0, hurry))
    hurry.set()
    await asyncio.wait_for(stopping, 15)


async def test_what_a_child_started_goes_with_it(watched: Watched) -> None:
    await watched.supervisor.start([spec(WITH_GRANDCHILD)])
    grandchild = psutil.Process(int(await watched.line()))
    await watched.supervisor.stop(1.0, asyncio.Event())
    assert still_running([grandchild]) == []


async def test_the_edge_stops_before_the_mesh_and_the_servers_last(watched: Watched) -> None:
    names = {"nats": Phase.SERVER, "worker": Phase.MESH, "gateway": Phase.EDGE}
    await watched.supervisor.start(
        [spec(polite(name), name, phase) for name, phase in names.items()]
    )
    for name in names:
        await watched.line(lambda text, name=name: text == f"{name} up")  # type: ignore[misc]
    await watched.supervisor.stop(5.0, asyncio.Event())
    assert [name for name, text in watched.lines if text == "left"] == ["gateway", "worker", "nats"]


async def test_children_die_when_their_parent_is_killed() -> None:
    code = (
        "import asyncio, sys\n"
        "from tokenmesh.cli.embedded.child import Child\n"
        "from tokenmesh.cli.embedded.child import ChildSpec, Phase\n"
        "async def main():\n"
        f"    spec = ChildSpec('c', (sys.executable, '-c', {SLEEP!r}), Phase.MESH)\n"
        "    child = Child(spec, 5, lambda *_: None)\n"
        "    await child.start(); print(child.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    orphan = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    assert still_running([orphan]) == []


async def test_a_child_sees_no_settings_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMESH_GATEWAY__PORT", "1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    environment = child_environment(ChildSpec("c", ("true",), Phase.MESH, {"OMP_NUM_THREADS": "2"}))
    assert "TOKENMESH_GATEWAY__PORT" not in environment
    assert "NOTIFY_SOCKET" not in environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PATH"]


async def test_endless_lines_and_bad_bytes_are_cut_not_fatal() -> None:
    lines: list[str] = []
    code = (
        "import os; os.write(1, b'x' * 1000000 + b'\\n'); os.write(1, b'\\xff\\xfe\\n'); "
        "os.write(1, b'last')"
    )
    child = Child(spec(code), 2, lambda _, line: lines.append(line))
    await child.start()
    assert await child.wait() == 0
    assert lines[-1] == "last"
    assert max(map(len, lines)) <= 8192
    assert len(child.tail) == 2


def test_a_death_is_explained_by_its_critical_complaint() -> None:
    tail = [
        '{"level": "info", "message": "loading"}',
        '{"level": "critical", "message": "no such model: x"}',
    ]
    assert explanation(tail) == "no such model: x"
    assert explanation(["tokenmesh: --port = 1"]) == "--port = 1"
    assert explanation(["Traceback", "ValueError: x"]) == "Traceback\nValueError: x"
    assert parse_line('{"level": 3}').severity == 0
    hostile = '{"level": "info", "message": "\\u001b[2J"}'
    assert "\x1b" not in parse_line(hostile).text + parse_line("\x1b[2J").text
