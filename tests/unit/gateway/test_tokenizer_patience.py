"""A tokenizer that is busy with a long prompt is not treated as one that hangs."""

from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from tests.unit.gateway.test_pipeline import JOB
from tokenmesh.services.gateway.core.generation.request import PromptJob
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.services.gateway.core.mesh.stages import Stages, check_fits
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import PayloadTooLarge, PromptTooLong
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    Tokenized,
)
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import pack_ids

SETTINGS = GatewaySettings(second_ask_s=0.5, second_ask_chars_per_s=1000.0)


class RecordingCalls(ServiceCalls):
    """Gives every request the same answer, and records the time until a hedged request."""

    max_message_bytes = 1000

    def __init__(self, answer: Tokenized) -> None:
        bus = cast("Any", None)
        prompts = HeldPrompts(bus, GatewayId("g"))
        super().__init__(bus, SETTINGS, bus, list, prompts, bus)
        self.hedge_after_s = 0.0
        self.max_tokens: int | None = None
        self._answer = answer

    async def request(  # type: ignore[override]
        self, _subject: str, message: Any, *_: Any, **fields: Any
    ) -> Any:
        self.hedge_after_s, self.max_tokens = fields["hedge_after_s"], message.max_tokens
        return self._answer


def stages_with(calls: RecordingCalls) -> Stages:
    nothing = cast("Any", None)
    streams, launcher = cast("Streams", nothing), cast("Launcher", nothing)
    return Stages(calls, streams, launcher)


def job_of(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> PromptJob:
    return PromptJob(
        request_id=JOB.request_id,
        card=JOB.card,
        prompt=prompt,
        sampling=JOB.sampling,
        max_tokens=1,
        deadline_s=0.0,
    )


@pytest.mark.parametrize(
    ("prompt", "hedge_after_s"),
    [
        (TextPrompt(text="Hi"), 0.502),
        (TextPrompt(text="Hi" * 2000), 4.5),
        (ChatPrompt(messages_json=b"x" * 3000, tools_json=b"y" * 1000), 4.5),
        (IdsPrompt(token_ids=pack_ids([1] * 500)), 1.0),
    ],
)
async def test_the_time_until_a_hedged_request_grows_with_the_prompt(
    prompt: TextPrompt | IdsPrompt | ChatPrompt, hedge_after_s: float
) -> None:
    calls = RecordingCalls(Tokenized(token_ids=pack_ids([1, 2])))
    calls.max_message_bytes = 5000
    await stages_with(calls).tokenize(job_of(prompt))
    assert calls.hedge_after_s == pytest.approx(hedge_after_s)


async def test_a_prompt_without_ids_is_too_long_by_what_the_tokenizer_counted() -> None:
    calls = RecordingCalls(Tokenized(token_ids=b"", too_many=4711))
    with pytest.raises(PromptTooLong, match="resulted in 4711 tokens"):
        await stages_with(calls).tokenize(job_of(TextPrompt(text="Hi")))
    assert calls.max_tokens == JOB.card.max_model_len


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(5, False), (7, True)])
async def test_log_probabilities_too_large_for_a_message_are_refused_early(
    num_tokens: int, is_refused: bool
) -> None:
    """214 bytes of each token but the first at least, in a message of 1,000."""
    calls = RecordingCalls(Tokenized(token_ids=pack_ids([1] * num_tokens)))
    job = job_of(TextPrompt(text="Hi"))
    sampling = msgspec.structs.replace(job.sampling, prompt_logprobs=20)
    tokenizing = stages_with(calls).tokenize(replace(job, sampling=sampling))
    if not is_refused:
        assert (await tokenizing).num_tokens == num_tokens
        return
    with pytest.raises(PayloadTooLarge, match="at least 1284 bytes") as caught:
        await tokenizing
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("num_top", [0, 1, 15, 20, 200])
def test_log_probabilities_that_fit_a_message_pass(num_top: int) -> None:
    """Even with the smallest encoding of each number."""
    entry = TokenLogprobs(0, -0.0, 1, [0] * num_top, [-0.0] * num_top)
    prompt: list[TokenLogprobs | None] = [None, *[entry] * 50]
    num_bytes = len(msgspec.msgpack.encode(prompt))
    check_fits(num_top, len(prompt), num_bytes)
    with pytest.raises(PayloadTooLarge):
        check_fits(num_top, len(prompt), num_bytes * 9 // 10)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(text="Hi" * 501),
        ChatPrompt(messages_json=b"x" * 1001),
        IdsPrompt(token_ids=pack_ids([1] * 251)),
    ],
)
async def test_a_prompt_too_large_for_a_message_is_refused_before_it_is_packed(
    prompt: TextPrompt | IdsPrompt | ChatPrompt,
) -> None:
    calls = RecordingCalls(Tokenized(token_ids=b""))
    with pytest.raises(PayloadTooLarge, match="1000 bytes"):
        await stages_with(calls).tokenize(job_of(prompt))
    assert calls.hedge_after_s == 0.0
