"""Which job a turn of a response is, at first and when somebody else goes on with it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.responses.records import Prompted
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.tokens import count_ids

_SEEDS: Final = 1 << SEED_BITS


def job_of_turn(job: PromptJob, number: int, seed: int, deadline_s: float) -> PromptJob:
    """`seed` is that of the first turn; each turn has another one."""
    sampling = msgspec.structs.replace(job.sampling, seed=(seed + number) % _SEEDS)
    return replace(job, sampling=sampling, deadline_s=deadline_s)


def resumed(job: PromptJob, recorded: Prompted, delivered: Sequence[int]) -> PromptJob:
    """The job after `delivered` tokens, on the very prompt that they were made of.

    Media are fetched again: their embeddings may have expired.
    """
    job = replace(job, max_tokens=recorded.max_tokens, delivered=tuple(delivered))
    if recorded.has_media:
        return job
    prompt = IdsPrompt(token_ids=recorded.packed_ids)
    return replace(job, prompt=prompt, truncate_prompt_tokens=None)


def recorded_prompt(turn: int, prompt: Prompt) -> Prompted:
    """What to remember of a prompt."""
    return Prompted(
        turn=turn,
        packed_ids=prompt.packed_ids,
        max_tokens=prompt.max_tokens,
        has_media=bool(prompt.media),
    )


def prompt_of(recorded: Prompted) -> Prompt:
    """As much of the prompt as a replay needs."""
    return Prompt(
        packed_ids=recorded.packed_ids,
        num_tokens=count_ids(recorded.packed_ids),
        max_tokens=recorded.max_tokens,
    )
