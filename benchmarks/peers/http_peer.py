"""A peer over HTTP: all prompts at once, streamed, token ids in, every answer checked.

Connections are open before the clock starts, and stay where the server runs between two turns: so
it is with every client's pool.
"""

import os
import time
from contextlib import nullcontext

import msgspec

from benchmarks.peers.child import awake
from benchmarks.peers.sample import Sample, sample_of
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.load import Load
from tokenmesh.cli.bench.workload import Ask, RequestShape

MODEL = "bench"
"""The served name of every model here."""
_SHAPE = RequestShape(MODEL, "completions", 0.0, ignore_eos=True)


class HttpPeer:
    """A running OpenAI-compatible server."""

    def __init__(self, url: str, timeout_s: float, frozen_pid: int | None = None) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._frozen_pid = frozen_pid
        """The process group to wake for a measurement; None: it runs all the time."""
        self._loads: dict[int, Load] = {}
        """By number of streams."""

    async def measure(self, prompts: list[list[int]], num_tokens: int) -> Sample:
        """A `Measure`."""
        load = self._load(len(prompts))
        waking = nullcontext() if self._frozen_pid is None else awake(self._frozen_pid)
        try:
            with waking:
                await load.connect()
                began_s, busy_s = time.perf_counter(), time.process_time()
                outcomes = await load.closed([Ask(prompt, num_tokens) for prompt in prompts])
                busy_s = time.process_time() - busy_s
                share = busy_s / (time.perf_counter() - began_s) / (os.cpu_count() or 1)
        finally:
            if self._frozen_pid is not None:
                load.close()  # once awake, it hangs up on connections that were idle for so long
        return msgspec.structs.replace(sample_of(outcomes), client_share=round(share, 4))

    def _load(self, streams: int) -> Load:
        if streams not in self._loads:
            server = Target(self._url, None)
            self._loads[streams] = Load(server, _SHAPE, streams, self._timeout_s, lambda _: None)
        return self._loads[streams]
