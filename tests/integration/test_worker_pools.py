"""A worker with the simulated engine answers Pools over the bus."""

import asyncio
import re
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.adapters import PREFIX, AdapterSpec, write_tensors
from tests.fakes.worker_rig import EPOCH, GATEWAY, MODEL, WORKER, Rig, running_rig
from tokenmesh.engine.adapters.adapter import SimAdapters, SimMatrices
from tokenmesh.engine.core.sim import sim_pooled
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.adapters.directories import AdapterDirectories
from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.shared import subjects
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages import Cancel, Failed, Message, Pool, PoolAnswer, Refused, Sleep
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.pooling import PoolingParams, PoolItem
from tokenmesh.shared.tokens import pack_ids

SIZE = 8
FACTS = PoolingFacts(("embed", "token_embed", "classify"), SIZE, ("no", "yes"))
EMBED = PoolingParams(task="embed")


@pytest.fixture
async def rig(bus: MessageBus, blobs: Blobs) -> AsyncIterator[Rig]:
    async with running_rig(bus, blobs, FACTS) as running:
        yield running


def pool(*prompts: list[int], **changes: Any) -> Pool:
    fields: dict[str, Any] = {
        "request_id": RequestId("p1"),
        "model": MODEL,
        "gateway": GATEWAY,
        "stream": 1,
        "epoch": EPOCH,
        "items": [PoolItem(prompt_ids=pack_ids(prompt)) for prompt in prompts],
        "params": EMBED,
    }
    return Pool(**{**fields, **changes})


async def ask(rig: Rig, message: Pool, timeout_s: float = 15.0) -> Message:
    subject = subjects.worker_generate(WORKER)
    try:
        return await rig.bus.request(subject, message, deadline_s=now_s() + timeout_s)
    except TokenMeshError as error:
        return to_failed(error)


async def begun(rig: Rig) -> None:
    """Wait until the engine was given a Pool."""
    async with asyncio.timeout(15):
        while not any(each.is_submitted for each in rig.actor._streams.live()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def emptied(rig: Rig) -> None:
    """Wait until the worker holds nothing."""
    async with asyncio.timeout(15):
        load = rig.actor.load()
        while load.running or load.queued_tokens:
            await asyncio.sleep(0.01)
            load = rig.actor.load()


def expected(prompt: list[int], params: PoolingParams = EMBED) -> bytes:
    return sim_pooled(prompt, params, SIZE, 2).data


async def test_each_item_is_answered_in_its_place(rig: Rig) -> None:
    prompts = [[10, 11, 12], [13], list(range(20, 60)), [10, 11, 12]]
    answer = await ask(rig, pool(*prompts))
    assert isinstance(answer, PoolAnswer)
    assert [each.data for each in answer.pooled] == [expected(each) for each in prompts]
    assert [each.shape for each in answer.pooled] == [[SIZE]] * 4
    await emptied(rig)


async def test_a_pool_has_more_items_than_the_worker_has_rows(rig: Rig) -> None:
    prompts = [[10 + index % 200, index // 200] for index in range(600)]
    answer = await ask(rig, pool(*prompts))
    assert isinstance(answer, PoolAnswer)
    assert [each.data for each in answer.pooled] == [expected(each) for each in prompts]


async def test_tokens_have_numbers_each(rig: Rig) -> None:
    params = PoolingParams(task="token_embed", dimensions=None)
    answer = await ask(rig, pool([10, 11, 12], params=params))
    assert isinstance(answer, PoolAnswer)
    assert answer.pooled[0].shape == [3, SIZE]
    assert answer.pooled[0].data == expected([10, 11, 12], params)


async def test_scores_of_labels_add_up_to_one(rig: Rig) -> None:
    answer = await ask(rig, pool([10, 11], params=PoolingParams(task="classify")))
    assert isinstance(answer, PoolAnswer)
    assert sum(array("f", answer.pooled[0].data)) == pytest.approx(1.0, abs=1e-6)


async def test_large_answers_travel_as_blobs(rig: Rig, blobs: Blobs) -> None:
    params = PoolingParams(task="token_embed")
    prompt = [index % 900 for index in range(500)]
    answer = await ask(rig, pool(*[prompt] * 80, params=params))
    assert isinstance(answer, PoolAnswer)
    inline = [each for each in answer.pooled if not each.blob]
    away = [each for each in answer.pooled if each.blob]
    assert inline
    assert away
    assert sum(len(each.data) for each in inline) <= 1 << 20
    assert await blobs.get(away[-1].blob) == expected(prompt, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": []}, "nothing to pool"),
        ({"items": [PoolItem(prompt_ids=b"")]}, "item 0 holds no token"),
        ({"items": [PoolItem(prompt_ids=b"abc")]}, "multiple of four"),
        ({"items": [PoolItem(prompt_ids=pack_ids([5000]))]}, "the id 5000"),
        ({"items": [PoolItem(prompt_ids=pack_ids([5] * 600))]}, "has 600 tokens"),
        ({"items": [PoolItem(prompt_ids=pack_ids([5]), type_ids=b"\x00\x00")]}, "2 type_ids"),
        ({"items": [PoolItem(prompt_ids=pack_ids([5]), type_ids=b"\x01")]}, "the type 1"),
        ({"params": PoolingParams(task="score")}, "does not score"),
        ({"params": PoolingParams(task="embed", dimensions=0)}, r"not in \[1, 8\]"),
        ({"params": PoolingParams(task="embed", dimensions=4)}, "its 8 dimensions only"),
        ({"lora": "a"}, "no adapter"),
        ({"attempt": -1}, "in range"),
    ],
)
async def test_bad_input_is_refused_by_name(
    rig: Rig, changes: dict[str, Any], message: str
) -> None:
    answer = await ask(rig, pool([10], **changes))
    assert isinstance(answer, Failed)
    assert re.search(message, answer.message), answer.message
    await emptied(rig)


async def test_pools_with_adapters_wait_their_turn(
    bus: MessageBus, blobs: Blobs, tmp_path: Path
) -> None:
    """Run more adapters than may run at a time; one that is cancelled gives up its place."""
    values = {"enable_lora": True, "max_loras": 1, "allowed_dirs": [str(tmp_path)]}
    settings = LoraSettings.model_validate(values)
    store = AdapterStore(settings, SimAdapters(settings), AdapterDirectories(settings))
    hashes = {}
    for seed, name in enumerate("abc"):
        tensors = {f"{PREFIX}layer.lora_{side}.weight": torch.full((1, 1), seed) for side in "AB"}
        path = write_tensors(tmp_path / name, tensors, AdapterSpec(rank=1))
        hashes[name] = (await store.load(name, str(path)))[0].content_hash
    async with running_rig(bus, blobs, FACTS, store) as rig:
        rig.brakes.hold()
        tasks = {
            name: asyncio.create_task(ask(rig, pool([10, 11], stream=stream, lora=name)))
            for stream, name in enumerate("abc", 1)
        }
        async with asyncio.timeout(15):
            while store.num_waiting < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await rig.control(Cancel(gateway=GATEWAY, stream=2, attempt=0))
        async with asyncio.timeout(8):
            while store.num_waiting > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        rig.brakes.release()
        answers = {name: await task for name, task in tasks.items()}
        for name in "ac":
            answer = answers[name]
            assert isinstance(answer, PoolAnswer)
            matrices = SimMatrices(hashes[name], 1)
            assert answer.pooled == [sim_pooled([10, 11], EMBED, SIZE, 2, matrices)]
        assert isinstance(answers["b"], Failed)
        other = await ask(rig, pool([10], stream=4, lora="a", lora_hash="other"))
        assert isinstance(other, Failed)
        assert "another content" in other.message
        await emptied(rig)
    assert (store.num_active, store.num_waiting) == (0, 0)


async def test_a_cancelled_pool_frees_the_engine(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool(*[[10, 11]] * 50)))
    await begun(rig)
    await rig.control(Cancel(gateway=GATEWAY, stream=1, attempt=0))
    answer = await task
    assert isinstance(answer, Failed)
    assert answer.code == "cancelled"
    rig.brakes.release()
    await emptied(rig)
    again = await ask(rig, pool([10]))
    assert isinstance(again, Refused), "a Pool that was cancelled is not begun again"


async def test_a_cancellation_may_come_first(rig: Rig) -> None:
    await rig.control(Cancel(gateway=GATEWAY, stream=1, attempt=0))
    assert isinstance(await ask(rig, pool([10])), Refused)


async def test_the_caller_gives_up(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool(*[[10, 11]] * 50), timeout_s=1.0))
    await begun(rig)
    assert isinstance(await task, Failed)
    rig.brakes.release()
    await emptied(rig)


async def test_a_lost_gateway_ends_its_pools(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool(*[[10, 11]] * 50)))
    await begun(rig)
    rig.alive.clear()
    assert isinstance(await task, Failed)
    rig.brakes.release()
    await emptied(rig)


async def test_sleep_ends_pools_and_refuses_new_ones(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool([10, 11])))
    await begun(rig)
    asleep = asyncio.create_task(rig.control(Sleep(level=1, mode="abort")))
    answer = await task
    rig.brakes.release()
    await asleep
    assert isinstance(answer, Failed)
    assert answer.code == "asleep"
    assert isinstance(await ask(rig, pool([10], stream=2)), Refused)


async def test_a_drained_worker_finishes_its_pools(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool([10, 11])))
    await begun(rig)
    drained = asyncio.create_task(rig.actor.drain(15.0))
    await asyncio.sleep(0)
    assert isinstance(await ask(rig, pool([10], stream=2)), Failed)
    rig.brakes.release()
    assert isinstance(await task, PoolAnswer)
    await drained


async def test_a_model_that_pools_generates_nothing(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match="does not generate"):
        await rig.generate()


async def test_a_model_that_generates_does_not_pool(bus: MessageBus, blobs: Blobs) -> None:
    async with running_rig(bus, blobs) as running:
        answer = await ask(running, pool([10]))
    assert isinstance(answer, Failed)
    assert "does not pool" in answer.message


async def test_load_counts_pools_and_their_tokens(rig: Rig) -> None:
    rig.brakes.hold()
    task = asyncio.create_task(ask(rig, pool(*[[10] * 100] * 30)))
    await begun(rig)
    load = rig.actor.load()
    assert (load.running, load.waiting) == (1, 0)
    assert load.queued_tokens > 0
    assert load.kv_blocks_used == 0
    rig.brakes.release()
    assert isinstance(await task, PoolAnswer)
