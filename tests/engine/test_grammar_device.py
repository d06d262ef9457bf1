"""Grammars on the CUDA runner with a fake GPU: tokens are those of the CPU."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes.cuda_driver import CudaDriver
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.grammars import EOS, Grammars, json_schema, make_checkpoint
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import prompt_of
from tests.rounds import rounds
from tokenmesh.engine.grammar.matcher import Masks
from tokenmesh.engine.sampling.sampler import NOTHING_ALLOWED
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 12,
}
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"enforce_eager": True}, {"async_scheduling": False})
KINDS = (
    Structured(kind="regex", text="[a-z]{3,9}(-[0-9]{2,5}){1,3}"),
    json_schema({"type": "array", "items": {"enum": ["a", 5, None]}, "maxItems": 3}),
    Structured(kind="choice", text='["yes", "no", "maybe"]'),
)


@pytest.fixture(autouse=True)
def _on_references() -> Iterator[None]:
    with torch.inference_mode(), reference_layers():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Grammars:
    return Grammars(checkpoint)


def job_of(grammars: Grammars, structured: Structured | None, seed: int, **fields: Any) -> Job:
    sampling = SamplingParams(
        **{"seed": seed, "max_tokens": 12, "structured": structured, **fields}
    )
    grammar = None if structured is None else grammars.compile(structured)
    return Job(prompt=prompt_of(3 + seed % 25, seed), sampling=sampling, grammar=grammar)


def random_jobs(grammars: Grammars, seed: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for number in range(10):
        structured = rng.choice((*KINDS, None))
        fields: dict[str, Any] = {
            "logprobs": rng.choice((None, 2)),
            "min_tokens": rng.choice((0, 3)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "temperature": rng.choice((0.0, 1.0)),
            "logit_bias": rng.choice(({}, {grammars.ids("e")[0]: 2.0})),
        }
        jobs.append(job_of(grammars, structured, 100 * seed + number, **fields))
    return jobs


@rounds("seed", 3, 9)
def test_tokens_are_those_of_the_cpu(checkpoint: Path, grammars: Grammars, seed: int) -> None:
    settings = SETTINGS[seed % 3]
    jobs = random_jobs(grammars, seed)
    expected = EngineDriver(checkpoint, max_model_len=96, native_kernels=False, **SIZES).run(
        jobs, steps_between=1
    )
    outcomes = CudaDriver(checkpoint, **SIZES, **settings).run(jobs, steps_between=1)
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == wanted.token_ids
        assert (outcome.reason, outcome.error) == (wanted.reason, wanted.error)
        ranks = [(each.token_id, each.rank) for each in outcome.logprobs]
        assert ranks == [(each.token_id, each.rank) for each in wanted.logprobs]
    assert any(job.grammar and o.reason == "stop" for job, o in zip(jobs, outcomes, strict=True))


def test_preempted_rows_find_their_place_again(checkpoint: Path, grammars: Grammars) -> None:
    long = Structured(kind="regex", text="[a-z]{40,60}[0-9]")
    jobs = [job_of(grammars, long, 20 + number, max_tokens=40) for number in range(4)]
    roomy = CudaDriver(checkpoint).run(jobs)
    tight = CudaDriver(checkpoint, num_gpu_blocks_override=8, kv_watermark=0.0).run(jobs)
    assert [each.token_ids for each in tight] == [each.token_ids for each in roomy]
    assert sum(each.num_preemptions for each in tight) > 0


@pytest.mark.parametrize("fields", [{"min_tokens": 9}, {"bad_words_ids": [[EOS]]}], ids=str)
def test_a_row_that_is_left_no_token_ends_alone(
    checkpoint: Path, grammars: Grammars, fields: dict[str, Any]
) -> None:
    jobs = [job_of(grammars, KINDS[2], 1, **fields), job_of(grammars, None, 2)]
    dead, alive = CudaDriver(checkpoint).run(jobs)
    assert (dead.reason, dead.error) == ("error", NOTHING_ALLOWED)
    assert dead.code == "invalid_request_error"
    assert alive.error is None


class Slow:
    """A grammar whose every step costs far too much."""

    num_bytes = 0

    def start(self) -> "Slow":
        return self

    def fill(self, masks: Masks, index: int) -> None:
        masks[index] = -1
        sum(range(3_000_000))

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError

    def is_terminated(self) -> bool:
        return False


def test_a_grammar_that_explodes_takes_no_other_row_with_it(
    checkpoint: Path, grammars: Grammars
) -> None:
    driver = CudaDriver(checkpoint, grammar_step_s=0.01)
    slow = job_of(grammars, KINDS[0], 1)
    jobs = [Job(slow.prompt, slow.sampling, grammar=Slow()), job_of(grammars, KINDS[0], 2)]
    ended, other = driver.run(jobs)
    assert ended.reason == "error"
    assert "longer than 0.01 s" in str(ended.error)
    assert ended.code == "invalid_request_error"
    assert other.error is None


def test_reasoning_does_not_end_a_stream_on_a_device_either(
    checkpoint: Path, grammars: Grammars
) -> None:
    end = grammars.ids("z.")
    structured = msgspec.structs.replace(KINDS[2], after=[end])
    favored = {EOS: 12.0, **dict.fromkeys(end, 10.0)}
    jobs = [
        job_of(grammars, structured, seed, logit_bias=favored, max_tokens=40) for seed in range(4)
    ]
    expected = EngineDriver(checkpoint, max_model_len=96, native_kernels=False, **SIZES).run(jobs)
    outcomes = CudaDriver(checkpoint, **SIZES).run(jobs)
    assert [each.token_ids for each in outcomes] == [each.token_ids for each in expected]
    ended = [outcome for outcome in outcomes if outcome.reason == "stop"]
    assert ended
    answers = {grammars.text(each.token_ids).rpartition("z.")[2] for each in ended}
    assert answers <= {"yes", "no", "maybe"}
