"""The worker actor with the simulated engine on the real bus."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.fakes.worker_rig import (
    EPOCH,
    GATEWAY,
    PROMPT,
    WORKER,
    Rig,
    expected,
    image,
    running_rig,
    tokens_of,
)
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.errors import (
    InvalidInput,
    PromptTooLong,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import BlobKey, ModelName
from tokenmesh.shared.messages import (
    Accepted,
    Cancel,
    Done,
    Refused,
    Resend,
    StreamUnknown,
)
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tokens import count_ids, pack_ids, unpack_ids


@pytest.fixture
async def rig(bus: MessageBus, blobs: Blobs) -> AsyncIterator[Rig]:
    async with running_rig(bus, blobs) as rig:
        yield rig


async def test_a_stream_is_accepted_and_its_tokens_arrive_in_order(rig: Rig) -> None:
    assert await rig.generate() == Accepted(worker_id=WORKER)
    deltas = await rig.finished()
    assert tokens_of(deltas) == expected(8)
    # steps that waited to be published are one delta
    lengths = [count_ids(delta.token_ids) for delta in deltas]
    assert [delta.offset for delta in deltas] == [sum(lengths[:at]) for at in range(len(deltas))]
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[0].cached_tokens == 0
    assert all((tokens.worker_id, tokens.epoch) == (WORKER, EPOCH) for tokens in rig.messages)


async def test_a_step_is_one_message_for_all_streams_of_a_gateway(rig: Rig) -> None:
    rig.brakes.hold()
    for stream in (1, 2, 3):
        await rig.generate(stream)
    rig.brakes.release()
    for stream in (1, 2, 3):
        await rig.finished(stream)
    assert max(len(tokens.deltas) for tokens in rig.messages) >= 2
    assert len({tokens.step for tokens in rig.messages}) == len(rig.messages)


async def test_the_second_of_two_equal_prompts_finds_the_blocks_of_the_first(rig: Rig) -> None:
    await rig.generate(1)
    await rig.finished(1)
    await rig.generate(2)
    assert (await rig.finished(2))[0].cached_tokens == 32
    await rig.idle()
    rendered = rig.metrics.render().decode()
    labels = '{engine="worker-1",model_name="tiny"}'
    assert f"tokenmesh:prefix_cache_hits_total{labels} 32.0" in rendered
    assert f"tokenmesh:generation_tokens_total{labels} 16.0" in rendered
    assert f"tokenmesh:request_num_preemptions_count{labels} 2.0" in rendered
    sources = re.findall(r'prompt_tokens_by_source_total{.*source="(.*)"} (.*)', rendered)
    assert sources == [("local_compute", "48.0"), ("local_cache_hit", "32.0")]
    states = re.findall(r'engine_sleep_state{.*sleep_state="(.*)"} (.*)', rendered)
    assert states == [("awake", "1.0"), ("weights_offloaded", "0.0"), ("discard_all", "0.0")]
    assert 'model_weights{engine="' in rendered
    assert 'format="simulated"' in rendered
    assert re.findall(r'cache_config_info{block_size="(\d+)".*} 1.0', rendered) == ["16"]


async def test_a_repeated_generate_changes_nothing(rig: Rig) -> None:
    assert await rig.generate() == await rig.generate()
    await rig.finished()
    assert await rig.generate() == Accepted(worker_id=WORKER)
    await rig.idle()
    assert tokens_of(rig.deltas()) == expected(8)


async def test_a_higher_attempt_goes_on_after_the_tokens_it_is_given(rig: Rig) -> None:
    rig.brakes.hold()
    await rig.generate()
    done = expected(3)
    again = await rig.generate(attempt=2, output_ids=pack_ids(done))
    assert again == Accepted(worker_id=WORKER)
    assert isinstance(await rig.generate(attempt=1), Refused)
    rig.brakes.release()
    await rig.until(lambda: any(delta.finish == "length" for delta in rig.deltas()))
    later = [delta for delta in rig.deltas() if delta.attempt == 2]
    assert later[0].offset == 3
    assert done + tokens_of(later) == expected(8)
    await rig.idle()


async def test_a_stream_that_had_only_lost_its_ending_gets_it(rig: Rig) -> None:
    await rig.generate(attempt=1, output_ids=pack_ids(expected(8)))
    (delta,) = await rig.finished()
    assert (delta.offset, delta.token_ids, delta.finish) == (8, b"", "length")


async def test_cancel_frees_the_blocks_and_a_late_generate_stays_cancelled(rig: Rig) -> None:
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    assert await rig.control(Cancel(gateway=GATEWAY, stream=1, attempt=0)) == Done()
    rig.brakes.release()
    assert (await rig.finished())[-1].finish == "abort"
    await rig.idle()
    assert await rig.control(Cancel(gateway=GATEWAY, stream=9, attempt=0)) == Done()
    assert await rig.generate(9) == Accepted(worker_id=WORKER)
    await rig.generate(2)
    await rig.finished(2)
    assert rig.deltas(9) == []


async def test_resend_repeats_everything_from_an_offset_on(rig: Rig) -> None:
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=8, logprobs=2))
    sent = await rig.finished()
    rig.messages.clear()
    ask = Resend(gateway=GATEWAY, stream=1, attempt=0, offset=0)
    assert await rig.control(ask) == Done()
    (whole,) = await rig.finished()
    assert unpack_ids(whole.token_ids) == tokens_of(sent)
    assert (whole.cached_tokens, whole.finish) == (0, "length")
    assert whole.logprobs == [entry for delta in sent for entry in delta.logprobs or []]
    rig.messages.clear()
    assert await rig.control(msgspec.structs.replace(ask, offset=6)) == Done()
    (rest,) = await rig.finished()
    assert (rest.offset, unpack_ids(rest.token_ids)) == (6, tokens_of(sent)[6:])
    for unknown in ({"stream": 5}, {"attempt": 1}, {"offset": 9}, {"offset": -1}):
        assert await rig.control(msgspec.structs.replace(ask, **unknown)) == StreamUnknown()


async def test_past_the_bounds_a_stream_is_refused(rig: Rig) -> None:
    rig.brakes.hold()
    long = SamplingParams(seed=5, max_tokens=100)
    answers = [await rig.generate(stream, sampling=long) for stream in range(7)]
    assert all(isinstance(answer, Accepted) for answer in answers[:6])
    refused = answers[6]
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0
    load = rig.actor.load()
    assert load.running + load.waiting == 6
    # A step may have begun with one request or with more.
    assert load.queued_tokens >= load.waiting * len(PROMPT) > 0


async def test_another_epoch_is_refused_and_another_model_is_an_error(rig: Rig) -> None:
    assert isinstance(await rig.generate(epoch=8), Refused)
    with pytest.raises(UnknownModel):
        await rig.generate(model=ModelName("other"))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": b""},
        {"prompt_ids": b"abc"},
        {"prompt_ids": pack_ids([1000])},
        {"output_ids": pack_ids([4_000_000_000])},
        {"lora": "adapter"},
        {"stream": -1},
        {"priority": 2**63},
        {"sampling": SamplingParams(seed=1, max_tokens=0)},
        {"sampling": SamplingParams(seed=1, max_tokens=2, min_tokens=3)},
        {"sampling": SamplingParams(seed=1, max_tokens=2, temperature=float("nan"))},
        {"sampling": SamplingParams(seed=1, max_tokens=2, top_p=-1.0)},
        {"sampling": SamplingParams(seed=1, max_tokens=2, top_k=-3)},
        {"sampling": SamplingParams(seed=1, max_tokens=2, logprobs=-1)},
        {"sampling": SamplingParams(seed=1, max_tokens=2, logit_bias={5000: 1.0})},
        {"sampling": SamplingParams(seed=1, max_tokens=2, allowed_token_ids=[])},
        {"sampling": SamplingParams(seed=1, max_tokens=2, bad_words_ids=[[]])},
        {"media": [image(-1, 2)]},
        {"media": [image(0, 99)]},
        {"media": [image(0, 4), image(3, 2)]},
    ],
)
async def test_what_no_gateway_would_send_is_an_error_and_nothing_worse(
    rig: Rig, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        await rig.generate(**changes)
    assert isinstance(
        await rig.generate(2, sampling=SamplingParams(seed=-1, max_tokens=3)), Accepted
    )
    assert len(tokens_of(await rig.finished(2))) == 3


async def test_a_prompt_that_does_not_fit_says_how_long_it_may_be(rig: Rig) -> None:
    with pytest.raises(PromptTooLong, match="context holds 512"):
        await rig.generate(sampling=SamplingParams(seed=1, max_tokens=2**40))


async def test_media_embeddings_are_fetched_before_the_stream_begins(
    rig: Rig, blobs: Blobs
) -> None:
    item = image(3, 2)
    missing = msgspec.structs.replace(item, embeddings=BlobKey("no such blob"))
    with pytest.raises(Exception, match="expired") as expired:
        await rig.generate(media=[missing])
    assert getattr(expired.value, "retryable", False)
    narrow = await blobs.put(TensorBlob("float32", (2, 3), bytes(24)).encode())
    with pytest.raises(Unavailable, match="embeddings of shape"):
        await rig.generate(media=[msgspec.structs.replace(item, embeddings=narrow)])
    key = await blobs.put(TensorBlob("float32", (2, 4), bytes(32)).encode())
    good = msgspec.structs.replace(item, embeddings=key)
    assert await rig.generate(media=[good]) == Accepted(worker_id=WORKER)
    assert len(tokens_of(await rig.finished())) == 8
