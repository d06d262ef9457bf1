"""Children that share imports are forked, and are children as all others."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import still_running
from tokenmesh.cli.embedded import fork_server
from tokenmesh.cli.embedded.child import ChildSpec, Phase
from tokenmesh.cli.embedded.fork_server import ForkServer
from tokenmesh.cli.embedded.supervisor import ProcessSupervisor
from tokenmesh.shared.config.up import UpSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child move")

LIMITS = UpSettings(restart_min_s=0.01, restart_max_s=0.02)
HEAVY = "import os\nimporter = os.getpid()\n"
PROGRAM = """
import os, sys, time, heavy
own = os.getpid()
words = (sys.argv[1], os.environ.get("MARK"), heavy.importer == own, os.getsid(0) == own)
print(*words, flush=True)
print("complaint", file=sys.stderr, flush=True)
if sys.argv[1] == "leaves":
    sys.exit(7)
time.sleep(60)
"""


class Family:
    """A supervisor, and what its children wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, str]] = []
        self.deaths: list[tuple[str, int]] = []
        self.supervisor = ProcessSupervisor(
            LIMITS,
            lambda name, line: self.lines.append((name, line)),
            lambda death, _: self.deaths.append((death.name, death.exit_code)),
        )

    def specs(self, *words: str, imports: tuple[str, ...] = ("heavy",)) -> list[ChildSpec]:
        environment = {"PYTHONPATH": f"{self.folder}:{Path.cwd()}"}
        command = (sys.executable, "-P", "-m", "program")
        return [
            ChildSpec(
                f"{word} {number}",
                (*command, word),
                Phase.MESH,
                {**environment, "MARK": str(number)},
                imports=imports,
            )
            for number, word in enumerate(words)
        ]

    async def said(self, count: int) -> list[str]:
        """The first words of each start, once so many have said all."""
        while True:
            lines = [line for _, line in self.lines]
            if lines.count("complaint") >= count:
                return [line for line in lines if line != "complaint"]
            await asyncio.sleep(0.005)


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Family]:
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "program.py").write_text(PROGRAM)
    known = set(psutil.Process().children(recursive=True))
    family = Family(tmp_path)
    yield family
    await family.supervisor.stop(1.0, asyncio.Event())
    assert set(psutil.Process().children(recursive=True)) == known


async def test_forks_share_imports_and_are_as_if_started_alone(family: Family) -> None:
    specs = family.specs("stays", "remains")
    await family.supervisor.start(specs)
    assert sorted(await family.said(2)) == ["remains 1 False True", "stays 0 False True"]
    for child in family.supervisor.children:
        process = psutil.Process(child.pid)
        assert process.ppid() == psutil.Process().pid
        # A shorter command line leaves empty words behind.
        assert tuple(filter(None, process.cmdline())) == child.spec.command
        assert process.environ()["MARK"] == child.spec.environment["MARK"]
        assert "TOKENMESH_ROOM" not in process.environ()
    assert not any(
        "fork_server" in " ".join(each.cmdline()) for each in psutil.Process().children()
    )


async def test_a_fork_that_dies_is_started_again_as_a_program(family: Family) -> None:
    await family.supervisor.start(family.specs("leaves", "stays"))
    lines = await family.said(3)
    assert family.deaths[0] == ("leaves 0", 7)
    assert lines.count("leaves 0 False True") == 1
    assert "leaves 0 True True" in lines


async def test_a_killed_fork_is_seen_at_once(family: Family) -> None:
    await family.supervisor.start(family.specs("stays", "remains"))
    await family.said(2)
    psutil.Process(family.supervisor.children[1].pid).kill()
    await family.said(3)
    assert family.deaths == [("remains 1", -9)]


async def test_what_cannot_be_imported_together_is_started_alone(family: Family) -> None:
    await family.supervisor.start(family.specs("stays", "remains", imports=("no_such_module",)))
    assert sorted(await family.said(2)) == ["remains 1 True True", "stays 0 True True"]


async def test_one_child_alone_is_not_forked(family: Family) -> None:
    await family.supervisor.start(family.specs("stays"))
    assert await family.said(1) == ["stays 0 True True"]


async def test_a_server_that_dies_leaves_the_rest_to_be_started_as_programs(family: Family) -> None:
    specs = family.specs("stays", "remains")
    server = await ForkServer.start(specs)
    assert server is not None
    (process,) = (
        each for each in psutil.Process().children() if "fork_server" in " ".join(each.cmdline())
    )
    process.kill()
    process.wait()
    try:
        assert await server.fork(specs[0], 1) is None
    finally:
        await server.close()


async def test_a_fork_that_up_does_not_know_ends_by_itself(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int) -> None:
        pids.append(pid)
        raise OSError

    pids: list[int] = []
    specs = family.specs("stays", "remains")
    monkeypatch.setattr(fork_server, "ForkedProcess", fail)
    await family.supervisor.start(specs)
    assert sorted(await family.said(2)) == ["remains 1 True True", "stays 0 True True"]
    for pid in pids:
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 1


async def test_a_late_answer_is_not_taken_for_another_one(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = family.specs("stays", "remains")
    server = await ForkServer.start(specs)
    assert server is not None
    monkeypatch.setattr(fork_server, "_ANSWER_S", 0.0)
    assert await server.fork(specs[0], 1) is None
    monkeypatch.undo()
    assert await server.fork(specs[1], 1) is None
    await server.close()


async def test_forks_die_when_up_is_killed(family: Family) -> None:
    code = (
        "import asyncio, sys\n"
        "from tokenmesh.cli.embedded.child import ChildSpec, Phase\n"
        "from tokenmesh.cli.embedded.supervisor import ProcessSupervisor\n"
        "from tokenmesh.shared.config.up import UpSettings\n"
        "async def main():\n"
        "    command = (sys.executable, '-P', '-m', 'program', 'stays')\n"
        f"    env = {{'PYTHONPATH': '{family.folder}:{Path.cwd()}'}}\n"
        "    specs = [ChildSpec(n, command, Phase.MESH, env, imports=('heavy',)) for n in 'ab']\n"
        "    supervisor = ProcessSupervisor(UpSettings(), lambda *_: None, lambda *_: None)\n"
        "    await supervisor.start(specs)\n"
        "    print(*(child.pid for child in supervisor.children), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    up = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert up.stdout is not None
    forks = [psutil.Process(int(pid)) for pid in (await up.stdout.readline()).split()]
    assert len(forks) == 2
    up.kill()
    await up.wait()
    assert still_running(forks) == []
