"""Rounds in which all peers take turns, so that each sees the machine as it is at that time."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.peers.results import ModelResult
from benchmarks.peers.roster import PEERS, Setting
from benchmarks.peers.sample import Measure
from benchmarks.random_model import ModelShape, random_prompts

_FAULTS = (RuntimeError, TimeoutError, OSError)
_WARM_STREAMS = 2
_WARM_LENGTHS = (16, 4)

Say = Callable[[str], None]


class Turns:
    """The running peers of one model; made by `open_turns`."""

    def __init__(self, shape: ModelShape, result: ModelResult, say: Say) -> None:
        self._shape = shape
        self._result = result
        self._say = say
        self._peers: dict[str, Measure] = {}

    async def open(self, name: str, setting: Setting, stack: AsyncExitStack) -> None:
        """Start a peer and warm it up; one that fails is noted as missing."""
        self._say(f"{self._shape.name}: starting {name}")
        prompts = random_prompts(self._shape, _WARM_STREAMS, _WARM_LENGTHS[0])
        try:
            measure = await PEERS[name](setting, stack)
            await measure(prompts, _WARM_LENGTHS[1])
        except _FAULTS as error:
            self._drop(name, error)
        else:
            self._peers[name] = measure

    async def round(self, streams: Sequence[int], lengths: tuple[int, int], number: int) -> None:
        """Every peer once at every number of streams; another one begins in each round.

        lengths: prompt and output tokens.
        """
        for count in streams:
            prompts = random_prompts(self._shape, count, lengths[0])
            names = deque(self._peers)
            names.rotate(-number)
            for name in names:
                await self._turn(name, prompts, lengths[1])

    async def _turn(self, name: str, prompts: list[list[int]], num_tokens: int) -> None:
        try:
            sample = await self._peers[name](prompts, num_tokens)
        except _FAULTS as error:
            self._drop(name, error)
            return
        by_peer = self._result.rounds.setdefault(len(prompts), {})
        by_peer.setdefault(name, []).append(sample)
        self._say(
            f"{self._shape.name}: {len(prompts):>2} streams, {name}: "
            f"{sample.tokens_per_s:.1f} tokens/s, decode {sample.decode_tokens_per_s:.1f}, "
            f"first token {sample.ttft_p50_ms:.1f} ms"
        )

    def _drop(self, name: str, error: Exception) -> None:
        self._peers.pop(name, None)
        self._result.missing[name] = f"{type(error).__name__}: {error}".strip()
        self._say(f"{self._shape.name}: without {name}: {self._result.missing[name]}")


@asynccontextmanager
async def open_turns(
    shape: ModelShape, result: ModelResult, names: Sequence[str], setting: Setting, say: Say
) -> AsyncIterator[Turns]:
    """Start the peers one after the other; end them all afterwards."""
    async with AsyncExitStack() as stack:
        turns = Turns(shape, result, say)
        for name in names:
            await turns.open(name, setting, stack)
        yield turns
