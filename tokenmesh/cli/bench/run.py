"""BenchRun: one measured load, from its settings to its outcomes."""

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.load import Load, Outcome
from tokenmesh.cli.bench.recordings import recordings
from tokenmesh.cli.bench.speculation import DraftCounters, Speculation
from tokenmesh.cli.bench.workload import (
    Ask,
    Endpoint,
    RandomPrompts,
    RequestShape,
    file_asks,
    first_model,
)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The settings of a run: what is sent where, and how fast."""

    base_url: str
    model: str | None
    """None: the first that the server lists."""
    endpoint: Endpoint
    dataset: Path | None
    """A file of prompts, or recordings; None: random prompts."""
    prompts: RandomPrompts
    num_prompts: int
    request_rate: float
    """Requests a second; infinite: as soon as `max_concurrency` allows."""
    burstiness: float
    max_concurrency: int
    num_warmups: int
    temperature: float
    ignore_eos: bool
    timeout_s: float
    seed: int
    path: str | None = None
    """The route that requests are sent to; None: the endpoint's own."""

    def config(self) -> dict[str, Any]:
        """As it is kept next to results; without the key."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "prompts"}
        found |= {name: getattr(self.prompts, name) for name in self.prompts.__slots__}
        rate = self.request_rate
        return {**found, "request_rate": "inf" if math.isinf(rate) else rate}

    async def measure(
        self, api_key: str | None, console: Console
    ) -> tuple[list[Outcome], Speculation | None]:
        """Warm up, then measure; with the server's drafts. Raises OSError and ValueError."""
        server = Target(self.base_url, api_key)
        shape = RequestShape(
            self.model or await first_model(server),
            self.endpoint,
            self.temperature,
            # the length of a transcript is that of its recording
            self.ignore_eos and self.endpoint != "transcriptions",
            self.path,
        )
        asks = await self._asks(server, shape)
        warm, asks = asks[: self.num_warmups], asks[self.num_warmups :]
        with _progress(console) as progress:
            bar = progress.add_task("warm-up", total=len(warm), errors="")
            failed = 0

            def count(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.error is not None
                progress.update(bar, advance=1, errors=f"[red]{failed} failed" if failed else "")

            load = Load(server, shape, self.max_concurrency, self.timeout_s, count)
            await load.closed(warm)
            drafts = DraftCounters(server)
            await drafts.begin()
            progress.reset(bar, total=len(asks), description="requests")
            if math.isinf(self.request_rate):
                outcomes = await load.closed(asks)
            else:
                random = Random(self.seed)
                outcomes = await load.open(asks, self.request_rate, random, self.burstiness)
            load.close()
        return outcomes, await drafts.found()

    async def _asks(self, server: Target, shape: RequestShape) -> list[Ask]:
        count = self.num_warmups + self.num_prompts
        random = Random(self.seed)
        if self.dataset is None:
            return await self.prompts.asks(server, shape, count, random)
        if self.endpoint == "transcriptions":
            return [Ask("", 0, each) for each in recordings(self.dataset, count, random)]
        return file_asks(self.dataset, count, self.prompts.output_len, random)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[errors]}"),
        console=console,
        refresh_per_second=2,
    )
