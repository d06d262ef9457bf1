"""Fake tokenizer and scheduler actors, and a whole mesh of fakes with a real gateway in front."""

import asyncio
import json
import secrets
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from tests.fakes import known_endpoints
from tests.fakes.tokenizers import byte_level_bpe
from tests.fakes.worker import FakeWorker, Script
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.app import make_app, open_journals
from tokenmesh.services.gateway.core.api import Background
from tokenmesh.services.gateway.core.http.server import Server
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.tokenizer_svc.actor import with_prompt
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.services.tokenizer_svc.texts import TextBatch
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.actor import Actor, ActorRuntime, Context, handles
from tokenmesh.shared.blobs import Blobs, content_key
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings, ServiceSettings
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, Unavailable
from tokenmesh.shared.hashing import ROUTE_BLOCK_TOKENS, chain_head, route_hashes, route_scope
from tokenmesh.shared.ids import GatewayId, ModelName, WorkerId, new_instance_id
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import (
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Generate,
    Place,
    Placed,
    ReadTokenizer,
    Refused,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerRead,
    TokenizeTexts,
)
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.tokenize import ChatPrompt, HeldPrompt, IdsPrompt
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.subjects import place_any, tokenize
from tokenmesh.shared.tokens import pack_ids, unpack_ids

known_endpoints.analyse_once()
MAX_MODEL_LEN = 256
_Work = TypeVar("_Work", bound=Background)
EOS = "<|im_end|>"


def eos_id() -> int:
    """The id that ends an answer."""
    found = fake_tokenizer().token_to_id(EOS)
    assert found is not None
    return found


@cache
def fake_tokenizer() -> Tokenizer:
    """A byte-level BPE with ChatML's special tokens."""
    with tempfile.TemporaryDirectory() as folder:
        byte_level_bpe(Path(folder))
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


@cache
def _fake_encoder() -> TextEncoder:
    return TextEncoder(fake_tokenizer())


def chat_text(prompt: ChatPrompt) -> str:
    """Render a conversation by the fake template."""
    messages = msgspec.json.decode(prompt.messages_json)
    lines = [f"{each['role']}: {json.dumps(each.get('content'))}" for each in messages]
    return "\n".join([*lines, "assistant: "])


class FakeTokenizer(Actor):
    """Answers like tokenizer_svc, with a template of one line."""

    def __init__(self) -> None:
        self._tokenizer = fake_tokenizer()
        self.received: list[Tokenize] = []
        self.defaults: dict[str, Any] = {}
        self.reasoning_parser = ""
        self.tool_call_parser = ""
        self.detects_parsers = False
        self.padding_id: int | None = None
        self.media: list[MediaItem] = []
        self.texts_received: list[TokenizeTexts] = []
        self.prompts: dict[str, str] = {}
        limits = TokenizerSettings()
        threads = Threads(limits)
        encoder = _fake_encoder()
        self._texts = TextBatch(encoder, limits, threads, None, has_type_ids=True)

    @handles(Tokenize)
    async def tokenize(self, message: Tokenize, context: Context) -> Tokenized:
        message = await with_prompt(context._bus, message, context.deadline_s)
        self.received.append(message)
        prompt = message.prompt
        assert not isinstance(prompt, HeldPrompt)
        if isinstance(prompt, IdsPrompt):
            ids = unpack_ids(prompt.token_ids)
        else:
            text = chat_text(prompt) if isinstance(prompt, ChatPrompt) else prompt.text
            if "broken template" in text:
                raise InvalidInput("the template is broken", param="chat_template")
            ids = self._tokenizer.encode(text).ids
        limit = message.truncate_prompt_tokens
        if limit is not None and limit >= 0:
            ids = ids[-limit:]
        packed = pack_ids(ids)
        scope = route_scope(message.model, "fake", ROUTE_BLOCK_TOKENS)
        return Tokenized(
            token_ids=packed,
            route_hashes=route_hashes(packed, ROUTE_BLOCK_TOKENS, scope, salt=message.cache_salt),
            route_head=chain_head(scope),
            media=prompt.media if isinstance(prompt, IdsPrompt) and prompt.media else self.media,
            bad_words_ids=[self._tokenizer.encode(word).ids for word in message.bad_words],
            offsets=pack_ids([0, 1] * len(ids)) if message.return_offsets else None,
            token_strs=(
                [self._tokenizer.id_to_token(each) or "" for each in ids]
                if message.return_token_strs
                else None
            ),
        )

    @handles(TokenizeTexts)
    async def tokenize_texts(self, message: TokenizeTexts, context: Context) -> TextsTokenized:
        self.texts_received.append(message)
        return await self._texts.tokenize(message, context.deadline_s)

    @handles(Detokenize)
    async def detokenize(self, message: Detokenize, context: Context) -> Detokenized:
        ids = unpack_ids(message.token_ids)
        return Detokenized(text=self._tokenizer.decode(ids, skip_special_tokens=False))

    @handles(Describe)
    async def describe(self, message: Describe, context: Context) -> Described:
        text = self._tokenizer.to_str()
        return Described(
            fingerprint=content_key(text.encode()),
            vocab_size=self._tokenizer.get_vocab_size(),
            special_ids=list(self._tokenizer.get_added_tokens_decoder()),
            has_chat_template=True,
            default_sampling_json=json.dumps(self.defaults).encode(),
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            prompts=self.prompts,
            detects_parsers=self.detects_parsers,
            padding_id=self.padding_id,
        )

    @handles(ReadTokenizer)
    async def read(self, message: ReadTokenizer, context: Context) -> TokenizerRead:
        text = self._tokenizer.to_str().encode()
        middle = len(text) // 2
        part = text[middle:] if message.offset else text[:middle]
        return TokenizerRead(data=part, num_bytes=len(text))


class FakeScheduler(Actor):
    """Takes the first worker that is not excluded, else the first that is."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.received: list[Place] = []
        self.is_full = False
        self.refusal: Refused | None = None
        self.delay_s = 0.0
        self.delays_s: list[float] = []
        """The delays of the next questions, in their order; then `delay_s`."""

    @handles(Place)
    async def place(self, message: Place, context: Context) -> Placed | Refused:
        self.received.append(message)
        if self.refusal is not None:
            return self.refusal
        await asyncio.sleep(self.delays_s.pop(0) if self.delays_s else self.delay_s)
        if self.is_full:
            raise Overloaded("every worker is full", retry_after_s=2.5)
        fresh = [each for each in self.workers if each.id not in message.exclude]
        if not self.workers:
            raise Unavailable("no worker")
        chosen = (fresh or self.workers)[0]
        return Placed(worker_id=chosen.id, epoch=chosen.epoch)


def saying(text: str) -> Script:
    """A script that says a text and stops."""
    tokenizer = fake_tokenizer()
    ids = [*tokenizer.encode(text).ids, eos_id()]
    return lambda generate: ids


class BackEnd:
    """A gateway on a free port with fakes behind it. Use as `async with`."""

    def __init__(
        self,
        bus_settings: BusSettings,
        redis_settings: RedisSettings,
        script: Script | None = None,
        responses: dict[str, Any] | None = None,
        service: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        self.model = ModelName(f"fake-{secrets.token_hex(4)}")
        self.script = script or saying("Hello from the mesh, na\u00efve caf\u00e9!")
        # All tests share a Redis, and each has its own model.
        gateway = GatewaySettings(port=0, **{"max_usage_models": 1 << 20, **limits})
        self.settings = Settings(
            bus=bus_settings,
            redis=redis_settings,
            gateway=gateway,
            responses=ResponseSettings(**(responses or {})),
            service=ServiceSettings(**(service or {})),
        )
        self.scheduler = FakeScheduler()
        self.workers: list[FakeWorker] = []
        self.step_s = 0.002
        self.tokens_per_step = 1
        self.card_fields: dict[str, Any] = {}
        """Fields of workers' cards in place of their defaults."""
        self.apis = APIS
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "BackEnd":
        try:
            await self._start()
        except BaseException:
            # What has begun would go on in a loop of a whole module.
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        self.bus = await self._connect("back-end")
        self.redis = open_redis(self.settings.redis)
        self._stack.push_async_callback(self.redis.close)
        self.blobs = Blobs(self.redis, self.settings.redis)
        self.tokenizer = FakeTokenizer()
        await self.start_tokenizer()
        self._placing = await self.listen(self.scheduler, place_any())
        self.members = Members(MembershipView(4, 100))
        await self.members.start(self.bus)
        await self.add_worker()
        await self._start_gateway()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def listen(self, actor: Actor, subject: str) -> ActorRuntime:
        runtime = ActorRuntime(actor, self.bus, ServiceSettings())
        await runtime.listen(subject)
        self._stack.push_async_callback(runtime.stop, 0.0)
        return runtime

    async def add_worker(self, script: Script | None = None) -> FakeWorker:
        bus = await connect(self.settings.bus, "worker")
        tokenizer = fake_tokenizer()
        card = ModelCard(
            name=self.model,
            aliases=[ModelName(f"{self.model}-alias")],
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.get_vocab_size(),
            created_s=1.0,
            hidden_size=4,
            eos_token_ids=[eos_id()],
            block_size=16,
        )
        card = msgspec.structs.replace(card, **self.card_fields)
        worker = FakeWorker(
            bus,
            WorkerId(new_instance_id("worker")),
            card,
            script or self.script,
            eos_id=eos_id(),
            step_s=self.step_s,
            tokens_per_step=self.tokens_per_step,
        )
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        self.workers.append(worker)
        self.scheduler.workers.append(worker)
        await self.until(lambda: len(self.members.workers(self.model)) == len(self.workers))
        return worker

    async def start_tokenizer(self) -> None:
        self._tokenizing = await self.listen(self.tokenizer, tokenize(self.model))
        await self.bus.flush()

    async def stop_tokenizer(self) -> None:
        """Stop all tokenizers."""
        await self._tokenizing.stop(0.0)
        await self.bus.flush()

    async def stop_scheduler(self) -> None:
        """Stop all schedulers."""
        await self._placing.stop(0.0)
        await self.bus.flush()

    async def until(self, is_so: Callable[[], bool], seconds: float = 15.0) -> None:
        """Return as soon as something is so."""
        async with asyncio.timeout(seconds):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def work(self, kind: type[_Work]) -> _Work:
        """The work of an API of the gateway besides its routes."""
        return next(each for each in self.gateway.background if isinstance(each, kind))

    async def _connect(self, name: str) -> MessageBus:
        bus = await connect(self.settings.bus, name)
        self._stack.push_async_callback(bus.close)
        return bus

    async def _start_gateway(self) -> None:
        bus = await self._connect("gateway")
        self.metrics = Metrics()
        self.gateway = Gateway(
            GatewayId(new_instance_id("gateway")),
            bus,
            self.blobs,
            self.members,
            self.settings,
            metrics=self.metrics,
            redis=self.redis,
            journals=open_journals(bus, self.settings),
            count_losses=lambda: bus.counts.get("disconnected", 0),
            apis=self.apis,
        )
        await self.gateway.start()
        self._stack.push_async_callback(self.gateway.stop)
        server = Server(make_app(self.gateway), self.settings.gateway, self.gateway.core.metrics)
        running = asyncio.create_task(self.gateway.run())
        serving = asyncio.create_task(server.run())
        self.url = f"http://127.0.0.1:{server.port}"

        async def stop() -> None:
            self.gateway.core.draining.set()
            server.stop(0.0)
            await serving
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self._stack.push_async_callback(stop)


def ignore_generate(ids: list[int]) -> Script:
    """A script of ids, whatever is asked."""

    def script(generate: Generate) -> list[int]:
        return ids

    return script
