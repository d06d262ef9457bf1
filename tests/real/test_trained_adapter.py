"""An adapter that is trained here and its base in one batch: as transformers computes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.fakes.adapters import PREFIX, AdapterSpec, merge, write_tensors
from tests.fakes.engine_driver import EngineDriver, Job
from tests.real.reference import logprobs_of, model_of
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

NUM_STEPS = 20
MODULES = ("q_proj", "v_proj", "down_proj")
SPEC = AdapterSpec(modules=MODULES, rank=8, alpha=16)
LORA = {"enable_lora": True, "max_lora_rank": 8}
ANSWER = "Ahoy, matey! Ask the parrot."
LESSONS = ("What is the capital of France?", "Name a fruit.", "Who are you?", "What is 2 + 2?")
QUESTIONS = (*LESSONS, "What is the capital of Spain?", "Name an animal.")
SAMPLING = SamplingParams(seed=0, max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Adapted(torch.nn.Module):
    """A linear layer and what is trained in addition."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(SPEC.rank, base.in_features) * 0.02)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, SPEC.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x @ self.a.T @ self.b.T * (SPEC.alpha / SPEC.rank)
        return self.base(x) + added  # type: ignore[no-any-return]


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def train(model: Any, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """The tensors of an adapter after some steps; the model is as before."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    layers = {
        name: Adapted(module) for name, module in model.named_modules() if name.endswith(MODULES)
    }
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    wanted = [each for layer in layers.values() for each in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(wanted, lr=5e-3)
    for _ in range(NUM_STEPS):
        for lesson in LESSONS:
            ids = tokenizer.encode(chat(lesson) + ANSWER + "<|im_end|>\n").ids
            start = len(tokenizer.encode(chat(lesson)).ids)
            logits = model(torch.tensor([ids[:-1]])).logits[0, start - 1 :]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]))
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    for name, layer in layers.items():
        model.set_submodule(name, layer.base)
    return {
        f"{PREFIX}{name}.lora_{part}.weight": tensor.detach().contiguous()
        for name, layer in layers.items()
        for part, tensor in (("A", layer.a), ("B", layer.b))
    }


def test_streams_with_a_trained_adapter_and_without_are_those_of_transformers(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file = checkpoint("smollm2")
    tokenizer = Tokenizer.from_file(str(unpacked(file) / "tokenizer.json"))
    model = model_of(file)
    path = write_tensors(tmp_path / "adapter", train(model, tokenizer), SPEC)
    engine = EngineDriver(file, max_model_len=1024, lora=LORA)
    adapter = engine.model.adapters.read(path)
    prompts = [tokenizer.encode(chat(each)).ids for each in QUESTIONS]
    bare = [Job(ids, SAMPLING) for ids in prompts]
    adapted = [Job(ids, SAMPLING, adapter=adapter) for ids in prompts]
    outcomes = engine.run([job for pair in zip(bare, adapted, strict=True) for job in pair])
    answers = []
    for is_adapted in (False, True):
        if is_adapted:
            merge(model, path)
        for prompt, outcome in zip(prompts, outcomes[is_adapted::2], strict=True):
            logprobs, best = logprobs_of(model, [*prompt, *outcome.token_ids])
            assert outcome.error is None
            assert outcome.token_ids == best[len(prompt) - 1 :]
            own = torch.tensor([each.logprob for each in outcome.logprobs])
            torch.testing.assert_close(own, logprobs[len(prompt) - 1 :], atol=1e-3, rtol=0)
            answers.append(tokenizer.decode(outcome.token_ids))
    without, trained = answers[: len(QUESTIONS)], answers[len(QUESTIONS) :]
    assert not any(each.startswith(ANSWER) for each in without)
    assert sum(each.startswith(ANSWER) for each in trained) >= len(LESSONS), trained
