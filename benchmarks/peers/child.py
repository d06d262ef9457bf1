"""Engines in processes of their own: asked over JSON lines, frozen while others are measured.

An engine may spin, poll or send heartbeats without a request; a stopped process does none of it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from benchmarks.peers.sample import Sample, sample_of
from benchmarks.serve.own_server import end_group, tail
from tokenmesh.cli.bench.load import Outcome
from tokenmesh.shared.parent_death import dies_with_parent

_LINE_LIMIT: Final = 64 << 20
_LEAVE_S: Final = 20.0
_Answer = TypeVar("_Answer")


class Task(msgspec.Struct):
    """Tells a child what to run: all prompts at once, greedy, so many tokens each."""

    prompts: list[list[int]]
    num_tokens: int


class Times(msgspec.Struct):
    """`time.perf_counter` seconds, which all processes of a machine share."""

    began_s: float
    token_times: list[list[float]]


class Ready(msgspec.Struct):
    """A child's first line: its model is loaded."""

    ready: bool


@contextmanager
def awake(pid: int) -> Iterator[None]:
    """Let a process group run for a while, then freeze it."""
    os.killpg(pid, signal.SIGCONT)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)


class Child:
    """A child program; made by `start_child`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, timeout_s: float) -> None:
        self._process = process
        self._log = log
        self._timeout_s = timeout_s

    async def measure(self, prompts: list[list[int]], num_tokens: int) -> Sample:
        """A `Measure`. Raises RuntimeError or TimeoutError when the child does not answer right."""
        times = await self.ask_awake(Task(prompts, num_tokens), Times)
        if {len(moments) for moments in times.token_times} != {num_tokens}:
            raise RuntimeError(f"a stream has not exactly {num_tokens} tokens")
        return sample_of(outcomes(times, prompts))

    async def ask_awake(self, task: object, kind: type[_Answer]) -> _Answer:
        """The same as `ask` of a child that is frozen before and after."""
        with awake(self._process.pid):
            return await self.ask(task, kind)

    async def ask(self, task: object, kind: type[_Answer]) -> _Answer:
        """One line there, one line back. Raises RuntimeError or TimeoutError."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        return await self.receive(kind)

    async def receive(self, kind: type[_Answer]) -> _Answer:
        """The child's next line. Raises RuntimeError or TimeoutError."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), self._timeout_s)
        if not line:
            # its last words come after its end of file
            await asyncio.wait_for(self._process.wait(), _LEAVE_S)
            raise RuntimeError(f"the child ended:\n{tail(self._log)}")
        return msgspec.json.decode(line, type=kind)


def outcomes(times: Times, prompts: Sequence[Sequence[int]]) -> list[Outcome]:
    """Return the outcomes that a load generator would have noted."""
    return [
        Outcome(times.began_s, moments[-1], moments, len(prompt), len(moments))
        for prompt, moments in zip(prompts, times.token_times, strict=True)
    ]


@asynccontextmanager
async def start_child(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    python: Path | str = sys.executable,
) -> AsyncIterator[Child]:
    """`python -m module` with a loaded model, frozen. Raises RuntimeError or TimeoutError."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            module,
            *arguments,
            env=dict(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_LIMIT,
            process_group=0,
            preexec_fn=dies_with_parent(),
        )
    try:
        child = Child(process, log, timeout_s)
        await child.receive(Ready)
        os.killpg(process.pid, signal.SIGSTOP)
        yield child
    finally:
        await end_group(process, signal.SIGTERM, _LEAVE_S)
