"""Streams with a known outcome: what was asked, what came, and when."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.serve.client import Chunk, Reply, Server
from benchmarks.serve.sim_oracle import SimOracle

_PROMPT_TOKENS = (8, 200)
_OUTPUT_TOKENS = (20, 140)
_NUM_CHOICES = (1, 1, 1, 2, 4)
_GAP_S = 0.05
"""Shorter silences are the machine's own."""


@dataclass(slots=True)
class Told:
    """One choice of a stream as the client sees it."""

    expected: str
    num_tokens: int
    """Expected ones, that of a stop string among them."""
    text: str = ""
    logged: str = ""
    """The tokens that log-probabilities came for."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """From the last token before to the first one after each silence."""
    heard_s: float | None = None

    def hear(self, text: str, now: float) -> None:
        """A chunk with text."""
        if self.heard_s is not None and now - self.heard_s > _GAP_S:
            self.gaps.append((self.heard_s, now))
        self.heard_s = now
        self.text += text


@dataclass(slots=True)
class Heard:
    """A whole request."""

    began_s: float
    first_s: float | None = None
    choices: list[Told] = field(default_factory=list)
    fault: str | None = None


class Streams:
    """Keeps a number of requests open at once, and remembers how each went."""

    def __init__(
        self, servers: list[Server], model: str, oracle: SimOracle, random: Random, timeout_s: float
    ) -> None:
        self._servers = servers
        self._model = model
        self._oracle = oracle
        self._random = random
        self._timeout_s = timeout_s
        self.heard: list[Heard] = []
        self.faults: Counter[str] = Counter()
        self.num_tokens = 0

    @property
    def num_choices(self) -> int:
        """Streams in the mesh's sense: choices of requests."""
        return sum(len(each.choices) for each in self.heard)

    async def run(self, concurrency: int, is_wanted: Callable[[], bool]) -> None:
        """Ask again and again, `concurrency` requests at a time, as long as it is wanted."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._repeat(is_wanted))

    async def _repeat(self, is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            heard = Heard(time.perf_counter())
            try:
                async with asyncio.timeout(self._timeout_s):
                    heard.fault = await self._ask(heard)
            except (TimeoutError, OSError) as error:
                heard.fault = type(error).__name__
            self.heard.append(heard)
            if heard.fault is not None:
                self.faults[heard.fault] += 1

    async def _ask(self, heard: Heard) -> str | None:
        body = self._draw(heard)

        def hear(chunk: Chunk) -> None:
            now = time.perf_counter()
            for choice in chunk.choices:
                told = heard.choices[choice.index]
                told.logged += "".join(choice.logprobs.tokens) if choice.logprobs else ""
                if choice.text:
                    heard.first_s = heard.first_s or now
                    told.hear(choice.text, now)

        server = self._random.choice(self._servers)
        connection = await server.connect()
        try:
            reply = await connection.send(server.request("POST", "/v1/completions", body), hear)
        finally:
            connection.close()
        self.num_tokens += reply.usage.completion_tokens if reply.usage else 0
        return _fault(reply, heard, has_logprobs=body["logprobs"] is not None)

    def _draw(self, heard: Heard) -> dict[str, object]:
        random, oracle = self._random, self._oracle
        ids = random.choices([*oracle.text_by_id], k=random.randint(*_PROMPT_TOKENS))
        seed, length = random.getrandbits(31), random.randint(*_OUTPUT_TOKENS)
        num_choices = random.choice(_NUM_CHOICES)
        texts = [oracle.text(ids, seed + index, length) for index in range(num_choices)]
        stop = random.choice([None, None, None, random.choice([*oracle.text_by_id.values()])])
        heard.choices = [_expect(text, stop, len(text) // length) for text in texts]
        return {
            "model": self._model,
            "n": num_choices,
            "max_tokens": length,
            "ignore_eos": True,
            "logprobs": random.choice([None, 1]) if stop is None else None,
            "stop": stop,
            "stream": True,
            "stream_options": {"include_usage": True},
            **oracle.body(ids, seed),
        }


def _expect(text: str, stop: str | None, token_chars: int) -> Told:
    said, found, _ = text.partition(stop) if stop else (text, "", "")
    return Told(said, num_tokens=(len(said) + len(found)) // token_chars)


def _fault(reply: Reply, heard: Heard, *, has_logprobs: bool) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if reply.status != 200:
        return f"http_{reply.status}"
    if reply.error is not None:
        return f"stream_{reply.error}"
    if not reply.is_done or len(reply.finish_reasons) != len(heard.choices):
        return "truncated"
    if any(told.text != told.expected for told in heard.choices):
        return "wrong_tokens"
    if has_logprobs and any(told.logged != told.expected for told in heard.choices):
        return "wrong_logprobs"
    num_tokens = sum(told.num_tokens for told in heard.choices)
    if reply.usage is None or reply.usage.completion_tokens != num_tokens:
        return "wrong_usage"
    return None
