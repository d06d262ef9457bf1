"""With a step in flight every request gets what it gets without, whatever it asks for."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs


def sampled(seed: int, **wishes: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=24, temperature=0.9, **wishes)


JOBS = (
    Job(prompt_of(7), greedy(30)),
    Job(prompt_of(33), sampled(1, top_p=0.9, logprobs=2)),
    Job(prompt_of(19), sampled(2, frequency_penalty=0.7, presence_penalty=0.4)),
    Job(prompt_of(1), sampled(3, repetition_penalty=1.4, ignore_eos=True)),
    Job(prompt_of(40), sampled(4, bad_words_ids=[[30, 31], [40]], prompt_logprobs=1)),
    Job(prompt_of(16), sampled(5, min_tokens=12, stop_token_ids=list(range(0, 160, 5)))),
    Job(prompt_of(17), sampled(6, stop_token_ids=list(range(0, 160, 9)), logprobs=0)),
    Job(prompt_of(25), sampled(7, allowed_token_ids=[5, 9, 33, 70], min_p=0.02)),
    Job([5, 160, 6], greedy(4)),
    Job(prompt_of(12), sampled(8, allowed_token_ids=[70], bad_words_ids=[[70]])),
    Job(prompt_of(28), sampled(9, logit_bias={2: 4.0}, top_k=20)),
    Job(prompt_of(21), sampled(10, min_tokens=9), output=prompt_of(5, seed=4)),
)
"""All that sampling can be asked for, stops of every kind, and two that must fail."""


@pytest.mark.parametrize("steps_between", [0, 1, 3])
@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 17), ("qwen2_window", 21)])
def test_overlap_changes_nothing_that_a_request_gets(
    tiny: Tiny, name: str, num_blocks: int, steps_between: int
) -> None:
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": 120,
        "kv_watermark": 0.0,
        "max_num_batched_tokens": 48,
        "long_prefill_token_threshold": 16,
        "max_num_seqs": 8,
    }
    alone, overlapped = (
        EngineDriver(tiny(name).directory, async_scheduling=is_async, **settings).run(
            JOBS, steps_between=steps_between
        )
        for is_async in (False, True)
    )
    for one, other in zip(alone, overlapped, strict=True):
        assert (one.token_ids, one.reason, one.error) == (
            other.token_ids,
            other.reason,
            other.error,
        )
        check_equal(one.logprobs, other.logprobs)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        check_equal(one.prompt_logprobs or [], other.prompt_logprobs or [])
    assert {outcome.reason for outcome in alone} == {"stop", "length", "error"}
    assert "not in the vocabulary" in (alone[8].error or "")
    assert "leave no token to draw" in (alone[9].error or "")


def check_equal(
    these: Sequence[TokenLogprobs | None], those: Sequence[TokenLogprobs | None]
) -> None:
    """But for the last digits, since batches differ."""
    assert len(these) == len(those)
    for one, other in zip(these, those, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
