"""Requests of the engine that want more than tokens, and bad ones that must not harm others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.shared.messages.sampling import SamplingParams


def with_logprobs(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        seed=1, max_tokens=4, temperature=0.0, prompt_logprobs=count, ignore_eos=True, **fields
    )


@pytest.mark.parametrize("chunk", [1, 5, 16, 1024])
def test_prompt_logprobs_are_those_of_transformers_in_any_chunks(tiny: Tiny, chunk: int) -> None:
    prompt = prompt_of(37)
    reference = tiny("qwen3").logits(prompt).log_softmax(-1)
    driver = EngineDriver(tiny("qwen3").directory, max_num_batched_tokens=chunk)
    (outcome,) = driver.run([Job(prompt, with_logprobs(3))])
    entries = outcome.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        row, token = reference[position - 1], prompt[position]
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert entry.top_ids == row.topk(3).indices.tolist()
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_prompt_logprobs_mix_with_requests_that_want_none(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory, long_prefill_token_threshold=6)
    jobs = [
        Job(prompt_of(30, seed=1), with_logprobs(0)),
        Job(prompt_of(9, seed=2), greedy(4)),
        Job(prompt_of(1, seed=3), with_logprobs(2)),
    ]
    outcomes = driver.run(jobs)
    assert len(outcomes[0].prompt_logprobs or ()) == 30
    assert outcomes[1].prompt_logprobs is None
    assert outcomes[2].prompt_logprobs == [None]
    assert [len(outcome.token_ids) for outcome in outcomes] == [4, 4, 4]


def test_logprobs_of_a_stream_are_those_of_transformers(tiny: Tiny) -> None:
    prompt = prompt_of(12)
    sampling = SamplingParams(seed=3, max_tokens=6, temperature=1.3, logprobs=2, ignore_eos=True)
    (outcome,) = EngineDriver(tiny("llama").directory).run([Job(prompt, sampling)])
    reference = tiny("llama").logits([*prompt, *outcome.token_ids]).log_softmax(-1)
    assert len(outcome.logprobs) == 6
    for index, entry in enumerate(outcome.logprobs):
        row = reference[len(prompt) - 1 + index]
        assert entry.token_id == outcome.token_ids[index]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.top_ids == row.topk(2).indices.tolist()


def test_tokens_outside_the_vocabulary_fail_their_request_alone(tiny: Tiny) -> None:
    good = Job(prompt_of(9), greedy(4))
    bad = Job([5, 160, 6], greedy(4))
    outcomes = EngineDriver(tiny("llama").directory).run([bad, good])
    assert "160 is not in the vocabulary of 160" in (outcomes[0].error or "")
    assert outcomes[1].token_ids == tiny("llama").greedy([list(good.prompt)], 4)[0]


def test_logits_that_are_not_finite_fail_their_request_and_corrupt_no_block(
    tiny: Tiny, tmp_path: Path
) -> None:
    for file in tiny("llama").directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][120] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    # prompts hold ids below 100, and so few blocks that all are used again
    driver = EngineDriver(tmp_path, num_gpu_blocks_override=17)
    good, bad = Job(prompt_of(26), greedy(4)), Job([*prompt_of(30, seed=1), 120], greedy(4))
    expected = tiny("llama").greedy([list(good.prompt)], 4)
    for _ in range(10):
        outcomes = driver.run([bad, good, bad])
        assert "not finite" in (outcomes[0].error or "")
        assert "not finite" in (outcomes[2].error or "")
        assert [outcomes[1].token_ids] == expected


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_a_score_that_overflows_ends_its_row_alone(
    tiny: Tiny, tmp_path: Path, native: bool
) -> None:
    for file in tiny("llama").directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    # only token 120 has the feature that the keys of the first layer overflow with
    embedding[:, 0], embedding[120] = 0.0, 0.0
    embedding[120, 0] = 1.0
    tensors["model.layers.0.self_attn.k_proj.weight"][:, 0] = 3e38
    save_file(tensors, tmp_path / "model.safetensors")
    driver = EngineDriver(tmp_path, native_kernels=native)
    prompt = prompt_of(30, seed=1)
    bad = Job([*prompt[:9], 120, *prompt[9:]], greedy(4))
    outcomes = driver.run([Job(prompt, greedy(4)), bad])
    assert outcomes[0].error is None
    assert "not finite" in (outcomes[1].error or "")


def test_a_stream_stops_at_the_end_of_sequence_token(tiny: Tiny) -> None:
    sampling = SamplingParams(seed=0, max_tokens=50, temperature=0.0, logit_bias={2: 6.0})
    (outcome,) = EngineDriver(tiny("llama").directory).run([Job(prompt_of(9), sampling)])
    assert outcome.reason == "stop"
    assert outcome.token_ids[-1] == 2
    assert 2 not in outcome.token_ids[:-1]


def test_the_longest_sequence_the_model_takes_can_be_served(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory, num_gpu_blocks_override=17)
    prompt = prompt_of(200)
    expected = tiny("llama").greedy([prompt], 56)
    assert driver.tokens([Job(prompt, greedy(56))]) == expected


def test_inference_leaves_no_gradients(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory)
    driver.tokens([Job(prompt_of(9), greedy(2))])
    assert torch.is_grad_enabled()
