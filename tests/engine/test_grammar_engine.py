"""Structured output from a random model: what it finishes follows its grammar, come what may."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.grammars import EOS, Grammars, json_schema, make_checkpoint
from tests.fakes.random_schemas import random_schema
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.grammar.matcher import CannotCompile, Grammar
from tokenmesh.shared.config.worker import GrammarBackend
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured

logger = logging.getLogger(__name__)

CLOSING = ('"', "}", "]")
"""Favored, so that a random model comes to an end."""
MANY = 500
FEW = 50


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Grammars:
    return Grammars(checkpoint)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> EngineDriver:
    return EngineDriver(checkpoint, num_gpu_blocks_override=4096, max_num_seqs=256)


def job_of(
    grammars: Grammars,
    structured: Structured | None,
    seed: int = 0,
    output: tuple[int, ...] = (),
    setting: GrammarBackend = "auto",
    grammar: Grammar | None = None,
    **fields: Any,
) -> Job:
    closing = {grammars.ids(each)[0]: 3.0 for each in CLOSING}
    sampling = SamplingParams(
        **{
            "seed": seed,
            "max_tokens": 150,
            "logit_bias": closing,
            "structured": structured,
            **fields,
        }
    )
    if grammar is None and structured is not None:
        grammar = grammars.compile(structured, setting)
    prompt = prompt_of(5 + seed % 40, seed)
    return Job(prompt=prompt, sampling=sampling, grammar=grammar, output=output)


def check(schema: Any, outcome: Outcome, grammars: Grammars) -> bool:
    """Return whether it was finished; then it must be valid."""
    assert outcome.error is None
    assert max(outcome.token_ids) < len(grammars.tokens.tokens)
    if outcome.reason != "stop":
        return False
    assert outcome.token_ids[-1] == EOS
    text = grammars.text(outcome.token_ids)
    Draft202012Validator(schema).validate(json.loads(text))
    return True


def run_schemas(
    driver: EngineDriver, grammars: Grammars, seeds: range, setting: GrammarBackend
) -> tuple[int, int]:
    """Count the schemas that had a grammar, and the outputs, two of each, that were finished."""
    schemas, jobs = [], []
    for seed in seeds:
        schema = random_schema(seed)
        structured = json_schema(schema)
        try:
            grammar = grammars.compile(structured, setting)
        except CannotCompile:
            continue
        schemas += [schema, schema]
        # n = 2: a matcher each, one grammar
        jobs += [job_of(grammars, structured, s, grammar=grammar) for s in (seed, ~seed)]
    outcomes = driver.run(jobs)
    finished = [
        check(schema, outcome, grammars) for schema, outcome in zip(schemas, outcomes, strict=True)
    ]
    return len(jobs) // 2, sum(finished)


@pytest.mark.parametrize("setting", ["auto", "guidance"])
def test_finished_json_is_valid(
    driver: EngineDriver, grammars: Grammars, setting: GrammarBackend
) -> None:
    num_compiled, num_finished = run_schemas(driver, grammars, range(FEW // 2), setting)
    assert num_compiled >= 0.9 * FEW // 2
    assert num_finished >= num_compiled


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", ["auto", "xgrammar", "guidance"])
def test_finished_json_is_valid_for_many_schemas(
    driver: EngineDriver, grammars: Grammars, setting: GrammarBackend
) -> None:
    num_compiled = num_finished = 0
    for first in range(0, MANY, FEW):
        seeds = range(10_000 + first, 10_000 + first + FEW)
        compiled, finished = run_schemas(driver, grammars, seeds, setting)
        num_compiled += compiled
        num_finished += finished
    logger.warning("%s: %d compiled, %d outputs finished", setting, num_compiled, num_finished)
    assert num_finished >= num_compiled
