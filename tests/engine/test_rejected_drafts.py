"""Drafts that are drawn apart from the streams' noise: streams keep the model's distribution."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, Final

from tests.engine.test_draft_models import K, spoiled, with_drafts
from tests.engine.test_drafts import check, jobs
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.shared.messages.sampling import SamplingParams

NUM_STREAMS: Final = 1500
KEPT: Final = 3
"""Tokens that a stream draws from."""
TEMPERATURE: Final = 1.3


def driver_of(directory: Path, draft: Path, **settings: Any) -> EngineDriver:
    config = {"model": str(draft), "num_speculative_tokens": K}
    config["rejection_sample_method"] = "probabilistic"
    return EngineDriver(directory, speculative_config=config, **settings)


def probabilities(checkpoint: TinyCheckpoint, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Those of the first three tokens of a stream, by transformers."""
    found: dict[tuple[int, ...], float] = {}
    first = chances(checkpoint, prompt)
    for one, two in product(first, range(KEPT)):
        second = chances(checkpoint, [*prompt, one])
        token = list(second)[two]
        for last, chance in chances(checkpoint, [*prompt, one, token]).items():
            found[one, token, last] = first[one] * second[token] * chance
    return found


def chances(checkpoint: TinyCheckpoint, token_ids: list[int]) -> dict[int, float]:
    values, ids = checkpoint.logits(token_ids)[-1].div(TEMPERATURE).topk(KEPT)
    shares: list[float] = values.double().softmax(-1).tolist()
    return dict(zip(ids.tolist(), shares, strict=True))


def test_sampled_streams_keep_the_distribution_of_the_model(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint, prompt = tiny("llama"), prompt_of(9, seed=2)
    draft = spoiled(checkpoint.directory, tmp_path / "draft", 0.03)
    driver = with_drafts(driver_of(checkpoint.directory, draft, max_num_seqs=64))
    fields: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": KEPT, "ignore_eos": True}
    some = [
        Job(prompt, SamplingParams(seed=seed, max_tokens=5, **fields))
        for seed in range(NUM_STREAMS)
    ]
    counts = Counter(tuple(tokens[:3]) for tokens in driver.tokens(some))
    expected = probabilities(checkpoint, prompt)
    assert counts.keys() <= expected.keys()
    deviations = [
        (counts[each] - NUM_STREAMS * share) ** 2 / (NUM_STREAMS * share)
        for each, share in expected.items()
    ]
    freedom = len(expected) - 1
    assert sum(deviations) < freedom + 4 * (2 * freedom) ** 0.5
    totals = driver.drafts
    assert totals.draft_tokens > NUM_STREAMS
    assert 0.2 < totals.accepted_tokens / totals.draft_tokens < 0.95


def test_greedy_streams_stay_the_same_and_sampled_ones_have_every_feature(
    tiny: Tiny, tmp_path: Path
) -> None:
    directory = tiny("llama").directory
    draft = spoiled(directory, tmp_path / "draft", 0.05)
    expected = EngineDriver(directory, max_num_seqs=9).run(jobs())
    every: list[dict[str, Any]] = [{}, {"num_blocks": 9, "kv_watermark": 0.0}]
    for settings in every:
        driver = with_drafts(driver_of(directory, draft, max_num_seqs=9), **settings)
        outcomes = driver.run(jobs(), steps_between=1)
        for job, outcome, wanted in zip(jobs(), outcomes, expected, strict=True):
            assert outcome.error is None
            assert len(outcome.logprobs) == len(wanted.logprobs)
            if job.sampling.temperature == 0.0:
                check([outcome], [wanted])
        assert driver.drafts.accepted_tokens > 100
