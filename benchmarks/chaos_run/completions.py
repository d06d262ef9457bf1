"""Completions of `sim` workers: n, log-probabilities, stop strings, with and without a seed."""

import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from random import Random

from benchmarks.chaos_run.received import ReceivedChoice, ReceivedResponse
from benchmarks.serve.sim_oracle import SimOracle
from tokenmesh.cli.bench.client import Reply, StreamChunk, Target
from tokenmesh.shared.ids import SeedSource

SEED = 1
"""The seed of the gateways: the seeds that they give to requests without one are known."""

_PROMPT_TOKENS = (8, 200)
_OUTPUT_TOKENS = (20, 140)
_NUM_CHOICES = (1, 1, 1, 2, 4)
_SEEDED = (True, True, True, True, False)
_MARGIN = 64
"""Seeds that a gateway may have drawn for requests which are not ours."""
_RECOGNIZED_BY = 16
"""Tokens."""


class Completions:
    """Implements `RequestKind` against what the oracle knows."""

    def __init__(
        self,
        servers: Mapping[str, list[Target]],
        model: str,
        oracle: SimOracle,
        random: Random,
    ) -> None:
        """`servers`: by tenant, as it asks them."""
        self._servers = servers
        self._model = model
        self._oracle = oracle
        self._random = random
        self._source = SeedSource(SEED)
        self._seeds: list[int] = []
        self._num_requests = 0

    async def send(self, received: ReceivedResponse) -> str | None:
        """See `RequestKind.send`."""
        self._num_requests += 1
        ids = self._random.choices([*self._oracle.text_by_id], k=self._draw_from(_PROMPT_TOKENS))
        received.num_prompt = len(ids)
        seed = self._random.getrandbits(31) if self._random.choice(_SEEDED) else None
        body = self._draw(ids, seed, received)

        def receive(chunk: StreamChunk) -> None:
            now = time.perf_counter()
            for choice in chunk.choices:
                if choice.text:
                    received.receive(choice.index, "text", choice.text, now)
                logged = choice.logprobs.tokens if choice.logprobs else []
                received.choices[choice.index].add("logged", "".join(logged))

        received.kind = "completion"
        received.tenant = self._random.choice([*self._servers])
        server = self._random.choice(self._servers[received.tenant])
        received.described = (
            f"port {server.port}, seed {seed}, stop {body['stop']}, {body['max_tokens']}"
        )
        connection = await server.connect()
        try:
            reply = await connection.send(server.request("POST", "/v1/completions", body), receive)
        finally:
            connection.close()
        note_usage(reply, received)
        if seed is None:
            seed = self._find_seed(ids, received)
        return fault_of_reply(reply, received) or self._judge(ids, seed, body, received)

    def _draw(
        self, ids: list[int], seed: int | None, received: ReceivedResponse
    ) -> dict[str, object]:
        random, num_choices = self._random, self._random.choice(_NUM_CHOICES)
        received.choices = [ReceivedChoice({}) for _ in range(num_choices)]
        stop = random.choice([None, None, None, random.choice([*self._oracle.text_by_id.values()])])
        if seed is None:
            # The few tokens before the stop do not identify a seed.
            stop = None
        body = {
            "model": self._model,
            "n": num_choices,
            "max_tokens": self._draw_from(_OUTPUT_TOKENS),
            "ignore_eos": True,
            "logprobs": random.choice([None, 1]) if stop is None else None,
            "stop": stop,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._oracle.body(ids, seed or 0),
        }
        if seed is None:
            del body["seed"]
        return body

    def _draw_from(self, bounds: tuple[int, int]) -> int:
        return self._random.randint(*bounds)

    def _judge(
        self, ids: list[int], seed: int, body: dict[str, object], received: ReceivedResponse
    ) -> str | None:
        length, stop, num_tokens = int(str(body["max_tokens"])), body["stop"], 0
        for index, shown in enumerate(received.choices):
            text = self._oracle.text(ids, seed + index, length)
            before, found, _ = text.partition(str(stop)) if stop else (text, "", "")
            shown.expected["text"] = before
            if body["logprobs"] is not None:
                shown.expected["logged"] = before
            num_tokens += (len(before) + len(found)) // (len(text) // length)
        return received.wrong or (None if received.num_tokens == num_tokens else "wrong_usage")

    def _find_seed(self, ids: list[int], received: ReceivedResponse) -> int:
        """The seed whose first choice begins with the received text; -1: there is none."""
        while len(self._seeds) < self._num_requests + _MARGIN:
            self._seeds.append(self._source.draw())
        begun = received.choices[0].texts.get("text", "")[
            : _RECOGNIZED_BY * self._oracle.token_chars
        ]
        return next(iter(self._oracle.seeds_writing(begun, ids, self._seeds)), -1)


def note_usage(reply: Reply, received: ReceivedResponse) -> None:
    """Note the usage that a stream reports at its end."""
    usage = reply.usage
    if usage is None:
        return
    details, drafted = usage.prompt_tokens_details, usage.completion_tokens_details
    received.num_accepted = (drafted and drafted.accepted_prediction_tokens) or 0
    received.num_tokens = usage.completion_tokens
    received.usage = Counter(
        requests=1,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else 0,
        completion_tokens=usage.completion_tokens,
    )


def leaves(reply: Reply) -> bool:
    """Return whether the gateway says that it drains: the client must use another one."""
    return reply.status == HTTPStatus.SERVICE_UNAVAILABLE and b'"draining"' in reply.body


def fault_of_reply(reply: Reply, received: ReceivedResponse) -> str | None:
    """Name what is wrong with an answer, whatever its text; None: nothing."""
    if leaves(reply):
        return "draining"
    if reply.status != 200:
        return f"http_{reply.status}"
    if reply.error is not None:
        return f"stream_{reply.error}"
    if not reply.is_done or len(reply.finish_reasons) != len(received.choices):
        return "truncated"
    return None
