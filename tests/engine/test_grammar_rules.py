"""A grammar together with everything else that happens to a stream."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.grammars import EOS, Grammars, json_schema, make_checkpoint
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.grammar.matcher import Masks
from tokenmesh.engine.sampling.sampler import NOTHING_ALLOWED
from tokenmesh.shared.config.worker import GrammarBackend
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured

WORD = Structured(kind="regex", text="[a-z]{3,9}(-[0-9]{2,5}){1,3}")
ROW = json_schema(
    {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
        "required": ["id", "tags"],
    }
)
BACKENDS: tuple[GrammarBackend, ...] = ("xgrammar", "guidance")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Grammars:
    return Grammars(checkpoint)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> EngineDriver:
    return EngineDriver(checkpoint)


class Maker:
    """Jobs of one backend."""

    def __init__(self, grammars: Grammars, setting: GrammarBackend) -> None:
        self._grammars = grammars
        self._setting = setting

    def __call__(self, structured: Structured | None, seed: int = 0, **fields: Any) -> Job:
        sampling = SamplingParams(
            **{"seed": seed, "max_tokens": 60, "structured": structured, **fields}
        )
        grammar = None
        if structured is not None:
            grammar = self._grammars.compile(structured, self._setting)
        return Job(prompt=prompt_of(7 + seed % 30, seed), sampling=sampling, grammar=grammar)


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, grammars: Grammars) -> Maker:
    return Maker(grammars, request.param)


def mixed(make: Maker) -> list[Job]:
    """Half of them without a grammar."""
    kinds = (WORD, None, ROW, None)
    return [make(kinds[seed % 4], seed) for seed in range(16)]


def test_neither_chunks_nor_preemption_nor_company_change_an_output(
    checkpoint: Path, driver: EngineDriver, make: Maker
) -> None:
    jobs = mixed(make)
    alone = [driver.tokens([job])[0] for job in jobs]
    assert driver.tokens(jobs) == alone
    crowded = EngineDriver(
        checkpoint,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=11,
        max_model_len=128,
        block_size=8,
    )
    outcomes = crowded.run(jobs, steps_between=3)
    assert [outcome.token_ids for outcome in outcomes] == alone
    constrained = [o for job, o in zip(jobs, outcomes, strict=True) if job.grammar is not None]
    assert sum(outcome.num_preemptions for outcome in constrained) > 0


def test_a_stream_goes_on_elsewhere_as_it_would_have_here(
    driver: EngineDriver, make: Maker
) -> None:
    for seed in range(4):
        job = make((WORD, ROW)[seed % 2], seed)
        (whole,) = driver.tokens([job])
        for cut in (1, len(whole) // 2, len(whole) - 1):
            assert driver.tokens([replace(job, output=whole[:cut])]) == [whole]


def test_an_output_that_broke_its_grammar_cannot_go_on(
    driver: EngineDriver, grammars: Grammars, make: Maker
) -> None:
    (outcome,) = driver.run([replace(make(WORD), output=grammars.ids("AB"))])
    assert outcome.reason == "error"
    assert "does not follow the grammar" in str(outcome.error)


CHOICES = ["yes", "no", 'n\u00f6 "really"', "a\nb"]
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (Structured(kind="regex", text="(ab|c)+[0-9]"), "(ab|c)+[0-9]"),
        (
            Structured(kind="choice", text=json.dumps(CHOICES)),
            "|".join(map(re.escape, CHOICES)),
        ),
        (Structured(kind="grammar", text='root ::= "a" b\nb ::= "x" | "y" b'), "ay*x"),
        (
            json_schema({"const": {"a": [1, 2]}}, any_whitespace=False),
            r'\{"a": ?\[1, ?2\]\}',
        ),
    ],
)
def test_finished_text_follows_its_grammar(
    driver: EngineDriver, grammars: Grammars, make: Maker, structured: Structured, pattern: str
) -> None:
    outcomes = driver.run([make(structured, seed) for seed in range(12)])
    finished = [grammars.text(each.token_ids) for each in outcomes if each.reason == "stop"]
    assert finished
    assert all(re.fullmatch(pattern, text) for text in finished)


def test_text_between_structural_tags_is_free_and_within_them_it_is_not(
    driver: EngineDriver, grammars: Grammars, make: Maker
) -> None:
    tag = Structured(kind="structural_tag", text=json.dumps(TAG))
    favored = {grammars.ids(each)[0]: 8.0 for each in "<}"}
    jobs = [make(tag, seed, logit_bias=favored, max_tokens=90) for seed in range(12)]
    texts = [grammars.text(each.token_ids) for each in driver.run(jobs)]
    # what the tag begins with is followed by an object in every case
    ended = [each for text in texts for each in re.findall("<f>(.*?)</f>", text, re.DOTALL)]
    begun = [each for text in texts for each in re.findall("<f>(.?)", text, re.DOTALL)]
    assert all(isinstance(json.loads(each), dict) for each in ended)
    assert all(each in ("", "{") for each in begun)


def test_reasoning_is_free_and_the_answer_after_it_is_not(
    driver: EngineDriver, grammars: Grammars, make: Maker
) -> None:
    end = grammars.ids("z.")
    structured = Structured(kind="choice", text='["yes"]', after=[grammars.ids("!?!"), end])
    favored = dict.fromkeys(end, 6.0)
    jobs = [make(structured, seed, logit_bias=favored) for seed in range(10)]
    answers, thoughts = [], []
    for outcome in driver.run(jobs):
        before, marker, answer = grammars.text(outcome.token_ids).partition("z.")
        thoughts.append(before)
        if marker and outcome.reason == "stop":
            answers.append(answer)
    assert answers
    assert set(answers) == {"yes"}
    assert any("yes".find(thought) < 0 for thought in thoughts)


@pytest.mark.parametrize(
    ("structured", "may_end"),
    [
        (Structured(kind="choice", text='["yes"]'), False),
        (Structured(kind="regex", text="(yes)?"), True),
    ],
)
def test_reasoning_cannot_end_a_stream_before_the_answer_that_the_grammar_wants(
    driver: EngineDriver, grammars: Grammars, make: Maker, structured: Structured, may_end: bool
) -> None:
    end = grammars.ids("z.")
    thinking = msgspec.structs.replace(structured, after=[end])
    favored = {EOS: 12.0, **dict.fromkeys(end, 10.0)}
    outcomes = driver.run([make(thinking, seed, logit_bias=favored) for seed in range(6)])
    ended = [outcome for outcome in outcomes if outcome.reason == "stop"]
    assert ended
    for outcome in ended:
        _, marker, answer = grammars.text(outcome.token_ids).rpartition("z.")
        assert may_end or (marker, answer) == ("z.", "yes")
    assert may_end is any(len(outcome.token_ids) == 1 for outcome in outcomes)


def test_a_finished_grammar_ends_the_stream_even_where_eos_is_ignored(
    driver: EngineDriver, make: Maker
) -> None:
    structured = Structured(kind="choice", text='["yes"]')
    (outcome,) = driver.run([make(structured, ignore_eos=True)])
    assert outcome.reason == "stop"
    assert outcome.token_ids[-1] == EOS


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 20},
        {"min_tokens": 20, "ignore_eos": True},
        {"allowed_token_ids": [300]},
        {"bad_words_ids": [[EOS]]},
    ],
)
def test_a_stream_that_is_left_no_token_ends_alone(
    driver: EngineDriver, make: Maker, fields: dict[str, Any]
) -> None:
    dead, alive = driver.run(
        [make(Structured(kind="choice", text='["yes"]'), **fields), make(None)]
    )
    assert (dead.reason, dead.error) == ("error", NOTHING_ALLOWED)
    assert dead.code == "invalid_request_error"
    assert alive.error is None


def test_a_stop_token_of_the_client_goes_on_working(
    driver: EngineDriver, grammars: Grammars, make: Maker
) -> None:
    stop = grammars.ids("-")
    (outcome,) = driver.run([make(WORD, 3, stop_token_ids=stop)])
    assert outcome.reason == "stop"
    assert outcome.token_ids[-1:] == stop


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


def test_a_grammar_that_explodes_takes_no_other_stream_with_it(
    checkpoint: Path, make: Maker
) -> None:
    driver = EngineDriver(checkpoint, grammar_step_s=0.01)
    jobs: Sequence[Job] = [replace(make(WORD), grammar=Slow()), make(WORD, 1), make(None)]
    slow, *others = driver.run(jobs)
    assert slow.reason == "error"
    assert "longer than 0.01 s" in str(slow.error)
    assert slow.code == "invalid_request_error"
    assert [each.error for each in others] == [None, None]
