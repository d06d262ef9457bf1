"""llama.cpp by its own benchmark program: no HTTP, no sampling, the next tokens are random.

The program starts anew for each measurement; loading the file is not part of its times.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.sample import Sample

_CONTEXT_STEP: Final = 256
"""Keys of a sequence are allocated in such steps."""
_LAST_TOKENS: Final = 1
"""A second, short run: reports are printed by a thread, and the program's end loses the last."""


class Report(msgspec.Struct):
    """The line that `llama-batched-bench --output-format jsonl` prints."""

    pp: int
    """Prompt tokens of each sequence."""
    tg: int
    """Generated tokens of each."""
    pl: int
    """Sequences."""
    t_pp: float
    t_tg: float
    """Seconds."""


class LlamaCpp:
    """`llama-batched-bench` on one file."""

    def __init__(
        self,
        program: Path,
        model: Path,
        threads: int,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._program = program
        self._model = model
        self._threads = str(threads)
        self._environment = environment
        self._timeout_s = timeout_s

    async def measure(self, prompts: list[list[int]], num_tokens: int) -> Sample:
        """A `Measure`; only the number and the length of the prompts matter."""
        expected = (len(prompts), len(prompts[0]), num_tokens)
        return read_report(await self._run(*expected), expected)

    async def _run(self, count: int, length: int, num_tokens: int) -> bytes:
        """Run the program; return what it prints."""
        context = count * -(-(length + num_tokens) // _CONTEXT_STEP) * _CONTEXT_STEP
        command = [str(self._program), "-m", str(self._model), "-c", str(context)]
        command += ["-b", "2048", "-ub", "512", "-t", self._threads, "-tb", self._threads]
        command += ["-npp", str(length), "-ntg", f"{num_tokens},{_LAST_TOKENS}", "-npl", str(count)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--output-format", "jsonl"),
            env=dict(self._environment),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return output


def read_report(output: bytes, expected: tuple[int, int, int]) -> Sample:
    """expected: sequences, prompt and generated tokens. Raises RuntimeError with the output."""
    for line in output.splitlines():
        if line.startswith(b"{"):
            report = msgspec.json.decode(line, type=Report)
            if (report.pl, report.pp, report.tg) != expected:
                continue
            tokens = report.pl * report.tg
            return Sample(
                tokens_per_s=round(tokens / (report.t_pp + report.t_tg), 2),
                decode_tokens_per_s=round(tokens / report.t_tg, 2),
                ttft_p50_ms=round(report.t_pp * 1e3, 3),
            )
    raise RuntimeError(f"no report of {expected}:\n{output[-2000:].decode(errors='replace')}")
