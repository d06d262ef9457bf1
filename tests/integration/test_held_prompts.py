"""Large prompts: read in parts by a tokenizer, so that no large message passes through NATS."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.services.tokenizer_svc.actor import with_prompt
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import NotFound, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages import Message, Ping, PromptRead, ReadPrompt, Tokenize
from tokenmesh.shared.messages.tokenize import (
    PROMPT_PART_BYTES,
    ChatPrompt,
    HeldPrompt,
    IdsPrompt,
    TextPrompt,
)

GATEWAY = GatewayId("prompts-gateway")
MOST = 4 * 2**20
LARGE = (
    TextPrompt(text="é" * 1_000_000, add_special_tokens=False),
    ChatPrompt(messages_json=b"x" * 1_000_000, chat_template="t"),
    IdsPrompt(token_ids=b"\x01\x02\x00\x00" * 100_000),
)


def request(prompt: TextPrompt | ChatPrompt | IdsPrompt | HeldPrompt) -> Tokenize:
    return Tokenize(request_id=RequestId("r"), model=ModelName("m"), prompt=prompt, max_tokens=7)


def prompt_of(num_bytes: int) -> HeldPrompt:
    return HeldPrompt(gateway=GATEWAY, number=0, num_bytes=num_bytes)


async def test_no_message_of_a_large_prompt_is_larger_than_a_part(
    tmp_path: Path, bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    sizes = [0]

    async def measure(_subject: str, data: bytes) -> None:
        sizes.append(len(data))

    text = "word " * 100_000
    messages = [{"role": "user", "content": text}]
    async with SmallMesh(tmp_path, bus_settings, redis_settings) as mesh:
        subscriptions = [await bus.subscribe_raw(each, measure) for each in ("tm.>", "_INBOX.>")]
        plain = await mesh.complete(prompt=text, truncate_prompt_tokens=5)
        body = {"model": mesh.model, "messages": messages, "max_tokens": 8}
        body["truncate_prompt_tokens"] = 5
        chat = await mesh.client.post("/v1/chat/completions", json=body)
        for each in subscriptions:
            await each.stop()
    for answer in (plain, chat):
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 5
    assert PROMPT_PART_BYTES < max(sizes) < PROMPT_PART_BYTES + 1000


@pytest.mark.parametrize("prompt", LARGE, ids=lambda prompt: type(prompt).__name__)
async def test_a_tokenizer_reads_what_the_gateway_holds(
    bus: MessageBus, prompt: TextPrompt | ChatPrompt | IdsPrompt
) -> None:
    prompts = HeldPrompts(bus, GATEWAY)
    await prompts.start()
    whole = request(prompt)
    with prompts.holding(whole, MOST) as sent:
        assert len(msgspec.msgpack.encode(sent)) < 200
        assert len(prompts) == 1
        assert await with_prompt(bus, sent, now_s() + 5) == whole
    assert len(prompts) == 0
    with pytest.raises(NotFound, match="no longer available"):
        await with_prompt(bus, sent, now_s() + 5)
    await prompts.stop()


async def test_a_small_prompt_is_sent_as_it_is(bus: MessageBus) -> None:
    prompts = HeldPrompts(bus, GATEWAY)
    whole = request(TextPrompt(text="x" * (PROMPT_PART_BYTES - 100)))
    with prompts.holding(whole, MOST) as sent:
        assert sent is whole
        assert len(prompts) == 0
        assert await with_prompt(bus, sent, now_s() + 5) is sent


@pytest.mark.parametrize("text", ["x" * MOST, "é" * (MOST // 2)])
def test_a_prompt_over_the_limit_of_messages_is_refused(bus: MessageBus, text: str) -> None:
    prompts = HeldPrompts(bus, GATEWAY)
    with (
        pytest.raises(PayloadTooLarge, match=f"{MOST} bytes"),
        prompts.holding(request(TextPrompt(text=text)), MOST),
    ):
        pass
    assert len(prompts) == 0


async def test_a_gateway_answers_for_its_own_prompts_only(bus: MessageBus) -> None:
    prompts = HeldPrompts(bus, GATEWAY)
    await prompts.start()
    subject = subjects.gateway_prompts(GATEWAY)

    async def read(offset: int) -> int:
        answer = await bus.request(
            subject, ReadPrompt(number=0, offset=offset), deadline_s=now_s() + 5
        )
        assert isinstance(answer, PromptRead)
        return len(answer.data)

    with prompts.holding(request(LARGE[2]), MOST) as sent:
        assert isinstance(sent.prompt, HeldPrompt)
        num_bytes = sent.prompt.num_bytes
        assert [await read(each) for each in (-5, num_bytes - 3, num_bytes, 2**40)] == [
            PROMPT_PART_BYTES,
            3,
            0,
            0,
        ]
        before = sum(bus.counts.values())
        await bus.publish(subject, Ping())
        async with asyncio.timeout(15):
            while sum(bus.counts.values()) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await read(0) == PROMPT_PART_BYTES
    await prompts.stop()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (PromptRead(data=b""), "expected a part"),
        (Ping(), "expected a part"),
        (PromptRead(data=b"\xc1" * 9), "undecodable prompt"),
        (PromptRead(data=b"\x80" * 9), "undecodable prompt"),
    ],
)
async def test_a_malformed_answer_of_a_gateway_is_a_protocol_error(
    bus: MessageBus, answer: Message, match: str
) -> None:
    async def reply(envelope: Envelope) -> None:
        await bus.reply(envelope, answer)

    subscription = await bus.subscribe(subjects.gateway_prompts(GATEWAY), reply)
    with pytest.raises(ProtocolError, match=match):
        await with_prompt(bus, request(prompt_of(9)), now_s() + 5)
    await subscription.stop()


async def test_a_prompt_too_large_for_a_message_is_not_read(bus: MessageBus) -> None:
    with pytest.raises(PayloadTooLarge):
        await with_prompt(bus, request(prompt_of(2**40)), now_s() + 5)
