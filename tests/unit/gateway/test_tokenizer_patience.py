"""A tokenizer that is busy with a long prompt is not taken for one that stands still."""

from typing import Any, cast

import pytest

from tests.unit.gateway.test_pipeline import JOB
from tokenmesh.services.gateway.calls import Calls
from tokenmesh.services.gateway.job import Job
from tokenmesh.services.gateway.launcher import Launcher
from tokenmesh.services.gateway.stages import Stages
from tokenmesh.services.gateway.streams import Streams
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import PromptTooLong
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from tokenmesh.shared.tokens import pack_ids

SETTINGS = GatewaySettings(second_ask_s=0.5, second_ask_chars_per_s=1000.0)


class NotingCalls:
    """Answers every question with the same, and notes how long it would have waited."""

    def __init__(self, answer: Tokenized) -> None:
        self.patience_s = 0.0
        self.max_tokens: int | None = None
        self._answer = answer

    async def ask(self, _subject: str, message: Tokenize, *_: Any, **fields: Any) -> Tokenized:
        self.patience_s, self.max_tokens = fields["patience_s"], message.max_tokens
        return self._answer


def stages_with(calls: NotingCalls) -> Stages:
    nobody = cast("Any", None)
    streams, launcher = cast("Streams", nobody), cast("Launcher", nobody)
    return Stages(GatewayId("g"), cast("Calls", cast("Any", calls)), streams, launcher, SETTINGS)


def job_of(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> Job:
    return Job(
        request_id=JOB.request_id,
        card=JOB.card,
        prompt=prompt,
        sampling=JOB.sampling,
        max_tokens=1,
        deadline_s=0.0,
    )


@pytest.mark.parametrize(
    ("prompt", "patience_s"),
    [
        (TextPrompt(text="Hi"), 0.502),
        (TextPrompt(text="Hi" * 2000), 4.5),
        (ChatPrompt(messages_json=b"x" * 3000, tools_json=b"y" * 1000), 4.5),
        (IdsPrompt(token_ids=pack_ids([1] * 500)), 1.0),
    ],
)
async def test_patience_grows_with_the_prompt(
    prompt: TextPrompt | IdsPrompt | ChatPrompt, patience_s: float
) -> None:
    calls = NotingCalls(Tokenized(token_ids=pack_ids([1, 2])))
    await stages_with(calls).tokenize(job_of(prompt))
    assert calls.patience_s == pytest.approx(patience_s)


async def test_a_prompt_without_ids_is_too_long_by_what_the_tokenizer_counted() -> None:
    calls = NotingCalls(Tokenized(token_ids=b"", too_many=4711))
    with pytest.raises(PromptTooLong, match="resulted in 4711 tokens"):
        await stages_with(calls).tokenize(job_of(TextPrompt(text="Hi")))
    assert calls.max_tokens == JOB.card.max_model_len
