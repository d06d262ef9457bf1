"""A peer over HTTP: all prompts at once, streamed, token ids in, every answer checked."""

from contextlib import nullcontext

from benchmarks.peers.child import awake
from benchmarks.peers.sample import Sample, sample_of
from benchmarks.serve.client import Server
from benchmarks.serve.load import Load
from benchmarks.serve.workload import Ask, Shape

MODEL = "bench"
"""The served name of every model here."""
_SHAPE = Shape(MODEL, "completions", 0.0, ignore_eos=True)


class HttpPeer:
    """A running OpenAI-compatible server."""

    def __init__(self, url: str, timeout_s: float, frozen_pid: int | None = None) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._frozen_pid = frozen_pid
        """The process group to wake for a measurement; None: it runs all the time."""

    async def measure(self, prompts: list[list[int]], num_tokens: int) -> Sample:
        """A `Measure`."""
        load = Load(Server(self._url, None), _SHAPE, len(prompts), self._timeout_s, lambda _: None)
        waking = nullcontext() if self._frozen_pid is None else awake(self._frozen_pid)
        try:
            with waking:
                outcomes = await load.closed([Ask(prompt, num_tokens) for prompt in prompts])
        finally:
            load.close()
        return sample_of(outcomes)
