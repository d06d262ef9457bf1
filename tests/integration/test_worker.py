"""The worker actor with the simulated engine on the real bus."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tokenmesh.services.worker_svc.actor import Identity, Surroundings, WorkerActor
from tokenmesh.services.worker_svc.engine.engine import Engine
from tokenmesh.services.worker_svc.engine.plan import StepPlan, StepResult
from tokenmesh.services.worker_svc.engine.sim import (
    SimLaunch,
    SimRunner,
    SimVocabulary,
    prompt_key,
    sim_token,
)
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.thread import EngineThread
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorLimits, ActorRuntime
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import (
    Draining,
    InvalidInput,
    PromptTooLong,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import BlobKey, GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import (
    Accepted,
    Cancel,
    Done,
    Drain,
    Generate,
    Message,
    Ping,
    Refused,
    Resend,
    StreamUnknown,
    Tokens,
)
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tokens import pack_ids, unpack_ids

WORKER = WorkerId("worker-1")
GATEWAY = GatewayId("gateway-1")
MODEL = ModelName("tiny")
EPOCH = 7
VOCABULARY = SimVocabulary(1000, (2,))
PROMPT = list(range(10, 50))


class Brakes:
    """Stands for the time a step takes: `hold` keeps the engine inside of one."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._released.set()

    def __call__(self, seconds: float) -> None:
        self._released.wait(5.0)

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()


@dataclass
class Rig:
    """A running worker and the gateway that talks to it."""

    bus: MessageBus
    actor: WorkerActor
    brakes: Brakes
    metrics: Metrics
    alive: set[GatewayId]
    left: list[bool]
    messages: list[Tokens] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        self.messages.append(envelope.message)
        self.arrived.set()

    async def generate(self, stream: int = 1, **changes: Any) -> Message:
        question = msgspec.structs.replace(request(stream), **changes)
        subject = subjects.worker_generate(WORKER)
        return await self.bus.request(subject, question, deadline_s=now_s() + 5)

    async def control(self, command: Message) -> Message:
        subject = subjects.worker_control(WORKER)
        return await self.bus.request(subject, command, deadline_s=now_s() + 5)

    def deltas(self, stream: int = 1) -> list[Delta]:
        return [
            delta for tokens in self.messages for delta in tokens.deltas if delta.stream == stream
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(8):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    async def finished(self, stream: int = 1) -> list[Delta]:
        await self.until(lambda: any(delta.finish for delta in self.deltas(stream)))
        return self.deltas(stream)

    async def idle(self) -> None:
        """A round trip after the last ending; then the engine must hold nothing."""
        await self.control(Ping())
        load = self.actor.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)


def request(stream: int) -> Generate:
    return Generate(
        request_id=RequestId(f"r{stream}"),
        model=MODEL,
        gateway=GATEWAY,
        stream=stream,
        epoch=EPOCH,
        prompt_ids=pack_ids(PROMPT),
        sampling=SamplingParams(seed=5, max_tokens=8),
    )


def image(offset: int, length: int) -> MediaItem:
    return MediaItem(
        kind="image", content_hash="c", offset=offset, length=length, pixels=BlobKey("p")
    )


def expected(count: int, sampling: SamplingParams | None = None) -> list[int]:
    key = prompt_key(PROMPT)
    sampling = sampling or request(1).sampling
    return [sim_token(key, sampling, position, VOCABULARY) for position in range(count)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in unpack_ids(delta.token_ids)]


async def no_beat() -> None:
    """Nobody places anything here."""


@pytest.fixture
def settings() -> WorkerSettings:
    return WorkerSettings(
        engine="sim",
        max_num_seqs=4,
        max_waiting=2,
        sim_num_blocks=64,
        sim_step_s=0.001,
        gateway_check_s=0.02,
        gateway_grace_s=0.1,
        max_step_failures=2,
        hand_over_s=0.5,
    )


@pytest.fixture
async def rig(bus: MessageBus, blobs: Blobs, settings: WorkerSettings) -> AsyncIterator[Rig]:
    brakes = Brakes()
    runner = SimRunner(VOCABULARY, settings, brakes)
    loaded = SimModel(
        runner, 512, VOCABULARY.size, frozenset({2}), hidden_size=4, takes_images=True
    )
    metrics = Metrics()
    alive = {GATEWAY}
    left: list[bool] = []
    around = Surroundings(
        bus, blobs, metrics, alive.__contains__, lambda: left.append(True), no_beat
    )
    host = EngineThread(Engine(runner, settings), settings)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), settings, loaded, host, around)
    runtime = ActorRuntime(actor, bus, ActorLimits())
    rig = Rig(bus, actor, brakes, metrics, alive, left)
    subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), rig.take)
    await runtime.listen(subjects.worker_generate(WORKER))
    await runtime.listen(subjects.worker_control(WORKER))
    await bus.flush()
    yield rig
    brakes.release()
    await runtime.stop(grace_s=1.0)
    await subscription.stop()


async def test_a_stream_is_accepted_and_its_tokens_arrive_in_order(rig: Rig) -> None:
    assert await rig.generate() == Accepted(worker_id=WORKER)
    deltas = await rig.finished()
    assert tokens_of(deltas) == expected(8)
    assert [delta.offset for delta in deltas] == list(range(8))
    assert [delta.finish for delta in deltas] == [None] * 7 + ["length"]
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
    assert load.queued_tokens >= 5 * len(PROMPT)


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


async def test_streams_of_a_vanished_gateway_end(rig: Rig) -> None:
    # Held from the start: a busy machine could otherwise let the stream end by itself.
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    rig.alive.clear()
    await asyncio.sleep(0.2)
    rig.brakes.release()
    assert (await rig.finished())[-1].finish == "abort"


async def test_a_draining_worker_refuses_and_hands_over_what_is_left(rig: Rig) -> None:
    assert await rig.control(Ping()) == Done()
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    assert await rig.control(Drain()) == Done()
    assert rig.left
    # not for want of room: its client shall not be told 429
    with pytest.raises(Draining):
        await rig.generate(2)
    draining = asyncio.create_task(rig.actor.drain(0.6))
    await asyncio.sleep(0.15)
    rig.brakes.release()
    await draining
    last = (await rig.finished())[-1]
    assert last.finish == "error"
    assert last.error is not None
    assert last.error.retryable


async def test_a_draining_worker_finishes_short_streams(rig: Rig) -> None:
    await rig.generate()
    await rig.actor.drain(5.0)
    assert (await rig.finished())[-1].finish == "length"


class BrokenLaunch(SimLaunch):
    """Fails."""

    def result(self) -> StepResult:
        raise RuntimeError("no such device")


class BrokenRunner(SimRunner):
    """Fails in every step."""

    def launch(self, plan: StepPlan) -> SimLaunch:
        return BrokenLaunch(StepResult(), 0.0, Brakes())


async def test_an_engine_that_keeps_failing_ends_the_service_and_every_stream(
    bus: MessageBus, blobs: Blobs, settings: WorkerSettings
) -> None:
    runner = BrokenRunner(VOCABULARY, settings, Brakes())
    loaded = SimModel(runner, 512, VOCABULARY.size, frozenset())
    around = Surroundings(bus, blobs, Metrics(), lambda _: True, lambda: None, no_beat)
    host = EngineThread(Engine(runner, settings), settings)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), settings, loaded, host, around)
    fatal = asyncio.Event()
    runtime = ActorRuntime(actor, bus, ActorLimits(), on_fatal=lambda _: fatal.set())
    rig = Rig(bus, actor, Brakes(), Metrics(), {GATEWAY}, [])
    subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), rig.take)
    await runtime.listen(subjects.worker_generate(WORKER))
    await rig.generate(1)
    (failed,) = await rig.finished(1)
    assert failed.error is not None
    assert failed.error.retryable
    assert "no such device" in failed.error.message
    assert not fatal.is_set()
    await rig.generate(2)
    await rig.finished(2)
    async with asyncio.timeout(5):
        await fatal.wait()
    await runtime.stop(grace_s=0.5)
    await subscription.stop()


async def test_a_step_that_never_ends_ends_the_service(
    bus: MessageBus, blobs: Blobs, settings: WorkerSettings
) -> None:
    brakes = Brakes()
    brakes.hold()
    hasty = settings.model_copy(update={"max_step_s": 0.1, "engine_check_s": 0.02})
    runner = SimRunner(VOCABULARY, hasty, brakes)
    loaded = SimModel(runner, 512, VOCABULARY.size, frozenset())
    around = Surroundings(bus, blobs, Metrics(), lambda _: True, lambda: None, no_beat)
    host = EngineThread(Engine(runner, hasty), hasty)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), hasty, loaded, host, around)
    fatal: asyncio.Queue[str] = asyncio.Queue()
    runtime = ActorRuntime(actor, bus, ActorLimits(), on_fatal=fatal.put_nowait)
    await runtime.listen(subjects.worker_generate(WORKER))
    await Rig(bus, actor, brakes, Metrics(), {GATEWAY}, []).generate()
    async with asyncio.timeout(5):
        assert await fatal.get() == "watch engine"
    brakes.release()
    await runtime.stop(grace_s=0.5)
