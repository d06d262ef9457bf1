"""The pipeline repeats a step when its result has expired."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.core.mesh.stages import Stages
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Placed
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt

JOB = PromptJob(
    request_id=RequestId("r"),
    card=ModelCard(name=ModelName("m"), max_model_len=8, vocab_size=8),
    prompt=IdsPrompt(token_ids=b""),
    sampling=SamplingParams(seed=0, max_tokens=1),
    max_tokens=1,
    deadline_s=0.0,
)


class ForgetfulStages:
    """Loses the pixels `num_losses` times."""

    def __init__(self, num_losses: int) -> None:
        self.steps: list[str] = []
        self._num_losses = num_losses

    async def tokenize(self, job: PromptJob) -> Prompt:
        self.steps.append("tokenize")
        return Prompt(packed_ids=b"", num_tokens=1, max_tokens=1)

    async def encode(self, job: PromptJob, prompt: Prompt) -> Prompt:
        self.steps.append("encode")
        if self._num_losses:
            self._num_losses -= 1
            raise NotFound("pixels have expired", param="media")
        return prompt

    async def place(self, job: PromptJob, prompt: Prompt) -> Placed:
        self.steps.append("place")
        return Placed(worker_id=WorkerId("w"), epoch=1)

    @asynccontextmanager
    async def generate(
        self, job: PromptJob, prompt: Prompt, placed: Placed, inbox: Inbox
    ) -> AsyncIterator[None]:
        self.steps.append("generate")
        yield


async def run(stages: ForgetfulStages) -> None:
    async with Pipeline(cast("Stages", cast("Any", stages)), cast("Any", None)).run(
        [JOB], Inbox(10)
    ):
        stages.steps.append("deliver")


async def test_the_steps_follow_each_other() -> None:
    stages = ForgetfulStages(0)
    await run(stages)
    assert stages.steps == ["tokenize", "encode", "place", "generate", "deliver"]


async def test_expired_pixels_are_made_again_once() -> None:
    stages = ForgetfulStages(1)
    await run(stages)
    assert stages.steps[:4] == ["tokenize", "encode", "tokenize", "encode"]
    assert stages.steps[-1] == "deliver"


async def test_pixels_that_expire_twice_are_an_error() -> None:
    with pytest.raises(NotFound):
        await run(ForgetfulStages(2))
