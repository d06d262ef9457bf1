"""Chats with images through tokenizer, encoder and worker, against transformers end to end."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.fakes.image_server import image_server
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import IMAGE_TOKEN, PATCH_SIZE, llava
from tests.fakes.models import randomized
from tests.fakes.service_mesh import running
from tests.fakes.stuck_encoder import stuck_encoder
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.services.mm_encoder_svc.main import build as build_encoder
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import (
    EncoderSettings,
    MediaSettings,
    ModelSettings,
    TokenizerSettings,
)
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Accepted, Encode, Generate, Tokens
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.redis import Redis, open_redis
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tokens import unpack_ids

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

MODEL = ModelName("llava")
GATEWAY = GatewayId("gateway-of-test")
REQUEST = RequestId("r")
NUM_TOKENS = 16
CACHE_BYTES = 64 * 1024
"""The cache of an encoder: embeddings of 20 images."""
REDIS_BYTES = 4 * 1024 * 1024
"""For features and embeddings of about 290 images."""
GROWTH_BYTES = 48 * 1024 * 1024
"""The bound of all processes; 800 files would take 144 MB."""

Messages = list[dict[str, Any]]


def turn(text: str, *seeds: int) -> Messages:
    """One user message: an image for each seed, each followed by the text."""
    parts: list[dict[str, object]] = []
    for seed in seeds:
        uri = data_uri(image_file(picture(seed, 37, 52)))
        parts.append({"type": "image_url", "image_url": {"url": uri}})
        parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": parts or text}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = llava(tmp_path_factory.mktemp("llava"))
    config = (directory / "config.json").read_text()
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    randomized(model).save_pretrained(directory)
    (directory / "config.json").write_text(config)
    return directory


@dataclass
class Oracle:
    """transformers from the messages to the tokens, with its own processor."""

    directory: Path

    def __post_init__(self) -> None:
        self.model: Any = LlavaForConditionalGeneration.from_pretrained(
            self.directory, dtype=torch.float32
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.directory)
        self.processor = LlavaProcessor(
            CLIPImageProcessorPil.from_pretrained(self.directory),
            self.tokenizer,
            patch_size=PATCH_SIZE,
            vision_feature_select_strategy="default",
            image_token=IMAGE_TOKEN,
            num_additional_image_tokens=1,
        )

    def inputs(self, messages: Messages, seeds: tuple[int, ...]) -> Any:
        text = self.tokenizer.apply_chat_template(
            [
                {**message, "content": [as_transformers_names(part) for part in message["content"]]}
                if isinstance(message["content"], list)
                else message
                for message in messages
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        images = [picture(seed, 37, 52) for seed in seeds] or None
        return self.processor(text=text, images=images, return_tensors="pt")

    def tokens(
        self, messages: Messages, seeds: tuple[int, ...], num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        inputs = self.inputs(messages, seeds)
        ids = self.model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def as_transformers_names(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image_url" else part


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@dataclass
class Output:
    """The tokens of one stream."""

    ended: asyncio.Future[list[int]]
    ids: list[int] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """Anything but all tokens, in order, once each, is an error of the stream."""
        new = unpack_ids(delta.token_ids)
        if delta.offset != len(self.ids):
            problem = f"tokens from {delta.offset} on follow {len(self.ids)} tokens"
        elif delta.finish not in (None, "length"):
            problem = f"ended by {delta.finish} after {len(self.ids)} tokens: {delta.error}"
        else:
            self.ids += new
            if delta.finish is not None and not self.ended.done():
                self.ended.set_result(self.ids)
            return
        if not self.ended.done():
            self.ended.set_exception(AssertionError(problem))


@dataclass
class Edge:
    """The part of a gateway that this test needs; it sends no heartbeats."""

    settings: Settings
    bus: MessageBus
    encoder: Mesh
    worker: Mesh
    outputs: dict[int, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = GatewaySettings(second_encode_s=1.0)
        prompts = HeldPrompts(self.bus, GATEWAY)
        members = self.worker.members
        self.calls = ServiceCalls(self.bus, settings, members, list, prompts, self.worker.metrics)

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        for delta in envelope.message.deltas:
            self.outputs[delta.stream].take(delta)

    async def tokenize(self, messages: Messages) -> Tokenized:
        prompt = ChatPrompt(messages_json=msgspec.json.encode(messages))
        question = Tokenize(request_id=REQUEST, model=MODEL, prompt=prompt)
        answer = await self.bus.request(subjects.tokenize(MODEL), question, deadline_s=now_s() + 10)
        assert isinstance(answer, Tokenized)
        return answer

    async def encoded(self, media: list[MediaItem]) -> list[MediaItem]:
        """By any encoder; by a second one if the first does not answer."""
        message = Encode(request_id=REQUEST, model=MODEL, items=media)
        return (await self.calls.encode(message, now_s() + 60)).items

    async def complete(self, messages: Messages, num_tokens: int = NUM_TOKENS) -> list[int]:
        prompt = await self.tokenize(messages)
        media = prompt.media
        if media:
            media = await self.encoded(media)
        stream = len(self.outputs)
        output = self.outputs[stream] = Output(asyncio.get_running_loop().create_future())
        generate = Generate(
            request_id=REQUEST,
            model=MODEL,
            gateway=GATEWAY,
            stream=stream,
            epoch=self.worker.epoch,
            prompt_ids=prompt.token_ids,
            sampling=SamplingParams(
                seed=0, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
            ),
            media=media,
        )
        subject = subjects.worker_generate(WorkerId(self.worker.instance_id))
        answer = await self.bus.request(subject, generate, deadline_s=now_s() + 10)
        assert isinstance(answer, Accepted)
        return await output.ended

    def counted(self, name: str) -> int:
        """The encoder's counter."""
        text = self.encoder.metrics.render().decode()
        return sum(
            int(float(value))
            for value in re.findall(rf"^tokenmesh:{name}_total.* (.+)$", text, re.M)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(checkpoint: Path, nats_server: Server, redis_server: Server) -> AsyncIterator[Edge]:
    model = ModelSettings(model=str(checkpoint), served_model_name=(MODEL,), dtype="float32")
    settings = Settings(
        models=(model,),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
        encoder=EncoderSettings(device="cpu", cache_bytes=CACHE_BYTES),
        tokenizer=TokenizerSettings(
            media=MediaSettings(allow_private_addresses=True, decode_processes=1)
        ),
        # a worker ends the streams of a gateway without heartbeats
        worker=WorkerSettings(kv_cache_memory_bytes=4 << 20, gateway_grace_s=3600.0),
    )
    async with AsyncExitStack() as stack:
        bus = await connect(settings.bus, "test")
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(running("tokenizer", settings, build_tokenizer))
        encoder = await stack.enter_async_context(running("encoder", settings, build_encoder))
        worker = await stack.enter_async_context(running("worker", settings, build_worker))
        edge = Edge(settings, bus, encoder, worker)
        subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), edge.take)
        stack.push_async_callback(subscription.stop)
        yield edge


CHATS = {
    "one image": ("what is it", (1,)),
    "three images": ("and this", (2, 3, 4)),
    "text only": ("The quick brown fox", ()),
    "the same image twice": ("again", (5, 5)),
}


@pytest.mark.parametrize("name", CHATS)
async def test_prompts_are_those_of_the_processor_of_transformers(
    edge: Edge, oracle: Oracle, name: str
) -> None:
    text, seeds = CHATS[name]
    ours = await edge.tokenize(turn(text, *seeds))
    theirs = oracle.inputs(turn(text, *seeds), seeds)
    assert unpack_ids(ours.token_ids) == theirs["input_ids"][0].tolist()
    assert len(ours.media) == len(seeds)


async def test_chats_with_and_without_images_continue_as_in_transformers(
    edge: Edge, oracle: Oracle
) -> None:
    chats = [(turn(text, *seeds), seeds) for text, seeds in CHATS.values()]
    together = await asyncio.gather(*(edge.complete(messages) for messages, _ in chats))
    assert together == [oracle.tokens(messages, seeds) for messages, seeds in chats]
    assert len({tuple(ids) for ids in together}) == len(chats)


async def test_an_image_of_an_earlier_turn_is_encoded_once(edge: Edge, oracle: Oracle) -> None:
    seeds = (90, 91)
    queries, hits = edge.counted("mm_cache_queries"), edge.counted("mm_cache_hits")
    first = await edge.complete(turn("look", *seeds))
    later = [
        *turn("look", *seeds),
        {"role": "assistant", "content": "I see"},
        {"role": "user", "content": "more"},
    ]
    second = await edge.complete(later)
    assert first == oracle.tokens(turn("look", *seeds), seeds)
    assert second == oracle.tokens(later, seeds)
    assert edge.counted("mm_cache_queries") - queries == 4
    assert edge.counted("mm_cache_hits") - hits == 2


def looking_at(url: str) -> Messages:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, "what"]}]


async def test_one_image_of_many_requests_is_fetched_and_encoded_once(edge: Edge) -> None:
    queries, hits = edge.counted("mm_cache_queries"), edge.counted("mm_cache_hits")
    async with image_server() as server:
        url = server.serve("/held.png", image_file(picture(92, 37, 52)))
        requests = [asyncio.create_task(edge.complete(looking_at(url), 2)) for _ in range(100)]
        while not server.hits:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.release.set()
        answers = await asyncio.gather(*requests)
        assert server.hits == ["/held.png"]
    assert len({tuple(ids) for ids in answers}) == 1
    assert edge.counted("mm_cache_queries") - queries == 100
    assert edge.counted("mm_cache_hits") - hits == 99


async def test_an_encoder_killed_in_a_batch_loses_nothing(edge: Edge, oracle: Oracle) -> None:
    queries = edge.counted("mm_cache_queries")
    chats: dict[int, asyncio.Task[list[int]]] = {}
    async with stuck_encoder(edge.settings, MODEL) as victim:
        while not victim.is_encoding:
            # each request goes to one of the two encoders, by chance
            if len(chats) < 40:
                seed = 200 + len(chats)
                chats[seed] = asyncio.create_task(edge.complete(turn("look", seed), 4))
            await asyncio.sleep(0.02)
        await victim.kill()
        answers = await asyncio.gather(*chats.values())
    assert answers == [oracle.tokens(turn("look", seed), (seed,), 4) for seed in chats]
    assert edge.counted("mm_cache_queries") - queries == len(chats)


async def used_memory(redis: Redis) -> int:
    memory = await redis.call("INFO", "memory")
    assert isinstance(memory, bytes)
    (used,) = re.findall(rb"^used_memory:(\d+)", memory, re.M)
    return int(used)


def resident_bytes() -> int:
    """Return the memory of this process, which runs the services, and of those that it started."""
    process, total = psutil.Process(), 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            total += each.memory_info().rss
    return total


@pytest.mark.parametrize(
    "count", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(280)])]
)
async def test_distinct_images_keep_every_process_in_its_bounds(edge: Edge, count: int) -> None:
    redis = open_redis(edge.settings.redis)
    bound = await used_memory(redis) + REDIS_BYTES
    await redis.call("CONFIG", "SET", "maxmemory", bound)
    await redis.call("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    sizes: list[int] = []
    try:
        for first in range(10_000, 10_000 + count, 20):
            chats = [large_turn(seed) for seed in range(first, first + 20)]
            answers = await asyncio.gather(*(edge.complete(chat, 1) for chat in chats))
            assert all(len(ids) == 1 for ids in answers)
            sizes.append(resident_bytes())
        assert await used_memory(redis) <= bound + 1024 * 1024  # buffers of connections
    finally:
        await redis.call("CONFIG", "SET", "maxmemory", "0")
        await redis.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await redis.close()
    text = edge.encoder.metrics.render().decode()
    (kept,) = re.findall(r"^tokenmesh:mm_cache_bytes.* (.+)$", text, re.M)
    assert 0 < float(kept) <= CACHE_BYTES
    # after the first 200, whose files alone have 36 MB, every cache is full
    assert sizes[-1] - sizes[min(10, len(sizes) - 1)] <= GROWTH_BYTES


def large_turn(seed: int) -> Messages:
    """One image, a file of 180 kB."""
    uri = data_uri(image_file(picture(seed, 200, 300), compress_level=0))
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
