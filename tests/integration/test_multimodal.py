"""Chats with images through tokenizer, encoder and worker, against transformers end to end."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import IMAGE_TOKEN, PATCH_SIZE, llava
from tests.fakes.models import randomized
from tests.fakes.service_mesh import running
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.mm_encoder_svc.main import build as build_encoder
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Accepted, Encode, Encoded, Generate, Tokens
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tokens import unpack_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = ModelName("llava")
GATEWAY = GatewayId("gateway-of-test")
REQUEST = RequestId("r")
NUM_TOKENS = 16

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

    def tokens(self, messages: Messages, seeds: tuple[int, ...]) -> list[int]:
        inputs = self.inputs(messages, seeds)
        ids = self.model.generate(
            **inputs,
            max_new_tokens=NUM_TOKENS,
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
class Edge:
    """The part of a gateway that this test needs."""

    bus: MessageBus
    encoder: Mesh
    worker: Mesh
    ids_by_stream: dict[int, list[int]] = field(default_factory=dict)
    done_by_stream: dict[int, asyncio.Event] = field(default_factory=dict)

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        for delta in envelope.message.deltas:
            assert delta.error is None, delta.error
            self.ids_by_stream[delta.stream] += unpack_ids(delta.token_ids)
            if delta.finish is not None:
                self.done_by_stream[delta.stream].set()

    async def tokenize(self, messages: Messages) -> Tokenized:
        prompt = ChatPrompt(messages_json=msgspec.json.encode(messages))
        question = Tokenize(request_id=REQUEST, model=MODEL, prompt=prompt)
        answer = await self.bus.request(subjects.tokenize(MODEL), question, deadline_s=now_s() + 10)
        assert isinstance(answer, Tokenized)
        return answer

    async def complete(self, messages: Messages) -> list[int]:
        prompt = await self.tokenize(messages)
        media = prompt.media
        if media:
            question = Encode(request_id=REQUEST, model=MODEL, items=media)
            encoded = await self.bus.request(
                subjects.encode(MODEL), question, deadline_s=now_s() + 10
            )
            assert isinstance(encoded, Encoded)
            media = encoded.items
        stream = len(self.ids_by_stream)
        self.ids_by_stream[stream] = []
        self.done_by_stream[stream] = asyncio.Event()
        generate = Generate(
            request_id=REQUEST,
            model=MODEL,
            gateway=GATEWAY,
            stream=stream,
            epoch=self.worker.epoch,
            prompt_ids=prompt.token_ids,
            sampling=SamplingParams(
                seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            ),
            media=media,
        )
        subject = subjects.worker_generate(WorkerId(self.worker.instance_id))
        answer = await self.bus.request(subject, generate, deadline_s=now_s() + 10)
        assert isinstance(answer, Accepted)
        async with asyncio.timeout(10):
            await self.done_by_stream[stream].wait()
        return self.ids_by_stream[stream]

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
        encoder=EncoderSettings(device="cpu"),
        worker=WorkerSettings(kv_cache_memory_bytes=4 << 20),
    )
    async with AsyncExitStack() as stack:
        bus = await connect(settings.bus, "test")
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(running("tokenizer", settings, build_tokenizer))
        encoder = await stack.enter_async_context(running("encoder", settings, build_encoder))
        worker = await stack.enter_async_context(running("worker", settings, build_worker))
        edge = Edge(bus, encoder, worker)
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
