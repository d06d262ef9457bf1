"""CPU of the gateway itself: per request and per token, without sockets and other services.

The application is called as uvicorn calls it, a bus inside the process answers at once, and an
engine that is free hands in one token a stream and step ("paced") or all at once ("burst"). What
uvicorn, NATS and the kernel add is not in it: `tokenmesh bench serve` measures the whole.
"""

import argparse
import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from time import process_time
from typing import Any, cast

import uvloop
from tokenizers import Tokenizer, decoders, models

from tokenmesh.services.gateway.app import make_app
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus, Envelope, Headers, Receiver
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, WorkerId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import (
    Accepted,
    Describe,
    Described,
    Done,
    Generate,
    Heartbeat,
    Message,
    Placed,
    ReadTokenizer,
    Tokenize,
    Tokenized,
    TokenizerRead,
    Tokens,
)
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import start_telemetry
from tokenmesh.shared.tokens import pack_ids

MODEL, WORKER = ModelName("bench"), WorkerId("worker-bench")
PATH = "/v1/chat/completions"
LETTERS = "abcdefghijklmnop"


class FreeMesh:
    """The other four services, all at once, for nothing. Stands in for `Bus` and `Blobs`."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(LETTERS)}, []))
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenized = Tokenized(token_ids=pack_ids([1] * prompt_tokens))
        self.position_by_stream: dict[int, int] = {}
        self.receive: Receiver | None = None
        self.max_message_bytes = 1 << 23

    max_message_bytes = 8 * 1024 * 1024

    async def request(self, _subject: str, message: Message, **_: object) -> Message:
        if isinstance(message, Tokenize):
            return self.tokenized
        if isinstance(message, Describe):
            return Described(
                fingerprint="t",
                vocab_size=len(LETTERS),
                special_ids=[],
                has_chat_template=True,
            )
        if isinstance(message, ReadTokenizer):
            text = self.tokenizer.to_str().encode()
            return TokenizerRead(data=text, num_bytes=len(text))
        if isinstance(message, Generate):
            self.position_by_stream[message.stream] = 0
            return Accepted(worker_id=WORKER)
        return Done()

    async def converse(self, *_: object, **__: object) -> AsyncIterator[Message]:
        yield Placed(worker_id=WORKER, epoch=1)

    async def publish(self, *_: object, **__: object) -> None:
        return

    publish_raw = publish

    async def subscribe(self, _subject: str, receiver: Receiver) -> None:
        self.receive = receiver

    subscribe_raw = publish

    async def run_engine(self, output_tokens: int, step_tokens: int) -> None:
        """One Tokens message for each turn of the event loop, for ever."""
        while True:
            await asyncio.sleep(0)
            deltas = list(self._step(output_tokens, step_tokens))
            if deltas and self.receive is not None:
                tokens = Tokens(worker_id=WORKER, epoch=1, step=0, deltas=deltas)
                await self.receive(Envelope("tokens", tokens, Headers()))

    def _step(self, output_tokens: int, step_tokens: int) -> Iterator[Delta]:
        for stream, position in tuple(self.position_by_stream.items()):
            num_new = min(step_tokens, output_tokens - position)
            is_last = position + num_new == output_tokens
            ids = pack_ids([each % len(LETTERS) for each in range(num_new)])
            yield Delta(stream, 0, position, ids, "length" if is_last else None)
            if is_last:
                del self.position_by_stream[stream]
            else:
                self.position_by_stream[stream] = position + num_new


async def one_request(app: Any, body: bytes) -> None:
    """Do what uvicorn does for one request, without the network."""
    is_over = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    await app({**scope, "query_string": b""}, receive, send)


def one_worker() -> Members:
    """A membership that a single worker keeps for ever."""
    view = MembershipView(4, 10)
    card = ModelCard(name=MODEL, max_model_len=10**6, vocab_size=len(LETTERS))
    alive = Heartbeat(
        service="worker",
        instance_id=InstanceId(WORKER),
        epoch=1,
        sequence=1,
        version="0",
        interval_s=1e6,
        models=[card],
    )
    view.observe(alive, monotonic_s())
    return Members(view)


async def measure(arguments: argparse.Namespace, step_tokens: int) -> float:
    """CPU seconds of one request."""
    mesh = FreeMesh(arguments.prompt_tokens)
    bus = cast("Bus", mesh)
    gateway = Gateway(
        GatewayId("gateway-bench"),
        bus,
        cast("Blobs", mesh),
        one_worker(),
        Settings(),
        metrics=Metrics(),
    )
    await mesh.subscribe("tokens", gateway.core.mesh.recovery.receive)
    app = make_app(gateway)
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x" * 4 * arguments.prompt_tokens}],
            "max_tokens": arguments.output_tokens,
            "stream": True,
        }
    ).encode()
    engine = asyncio.create_task(mesh.run_engine(arguments.output_tokens, step_tokens))

    async def load(num_requests: int) -> None:
        waiting = iter(range(num_requests))

        async def client() -> None:
            for _ in waiting:
                await one_request(app, body)

        await asyncio.gather(*(client() for _ in range(arguments.concurrency)))

    await load(2 * arguments.concurrency)
    gc.collect()
    gc.freeze()
    started_s = process_time()
    await load(arguments.requests)
    spent_s: float = process_time() - started_s
    engine.cancel()
    return spent_s / int(arguments.requests)


async def run(arguments: argparse.Namespace) -> None:
    """Both ways, and their difference as the price of a token."""
    if arguments.trace:
        bus = cast("Bus", FreeMesh(0))
        start_telemetry("gateway", InstanceId("gateway-bench"), Settings().telemetry, bus)
    burst_s = await measure(arguments, arguments.output_tokens)
    paced_s = await measure(arguments, 1)
    token_s = (paced_s - burst_s) / max(1, arguments.output_tokens - 1)
    print(f"request, tokens in one burst  {burst_s * 1e6:7.0f} us")
    print(f"request, tokens one by one    {paced_s * 1e6:7.0f} us")
    print(f"a paced token                 {token_s * 1e6:7.1f} us")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--trace", action="store_true", help="with spans")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
