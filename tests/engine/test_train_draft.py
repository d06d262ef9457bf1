"""`tokenmesh train-draft`: a head learns to guess what its model answers, and is served."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_draft_models import with_drafts
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.training.answers import LearnedText
from tokenmesh.engine.training.eagle3 import HeadSizes, TrainedHead
from tokenmesh.engine.training.fit import Fit, FitSettings, save
from tokenmesh.shared.errors import ConfigError

SIZES = HeadSizes(64, 80, 4, 2, 16, 5000.0, 1e-5, 3, 40)


def test_a_chain_of_the_trained_head_is_what_it_computes_one_by_one() -> None:
    """A step at a position reads what a chain of drafts that ends there would read."""
    torch.manual_seed(1)
    head, length, steps = TrainedHead(SIZES), 9, 3
    tokens = torch.randn(1, length, 64)
    taps = torch.randn(1, length, 3 * 64)
    with torch.no_grad():
        guesses = head.guesses(tokens, taps, steps)
        for end in range(steps, length):
            for step in range(steps):
                states = head.fc(taps[:, : end - step + 1])
                for _ in range(step):
                    made = head._layer(tokens[:, : states.shape[1]], states, [], [])
                    states = torch.cat([states, made[:, -1:]], dim=1)
                made = head._layer(tokens[:, : end + 1], states, [], [])[:, -1]
                expected = head.lm_head(head.norm(made))
                assert torch.allclose(guesses[step][:, end], expected, atol=1e-4)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 layers."""
    directory = tmp_path_factory.mktemp("deep")
    make_fake(Fake("Llama", {"num_hidden_layers": 6})).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("native", [True, False])
def test_a_layer_that_is_named_twice_is_read_twice(deep: Path, native: bool) -> None:
    runner = EngineDriver(deep, native_kernels=native).model.runner
    assert isinstance(runner, TorchRunner)
    torch.use_deterministic_algorithms(True)
    try:
        # in this mode torch fills new memory with NaN
        _, taps = runner.states(prompt_of(12), (2, 3, 3))
        _, other = runner.states(prompt_of(12), (3, 2, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(taps[:, 0], other[:, 1])
    assert torch.equal(taps[:, 1], other[:, 0])
    assert torch.equal(taps[:, 2], other[:, 0])


def test_a_head_learns_its_models_answers_and_drafts_them(deep: Path, tmp_path: Path) -> None:
    driver = EngineDriver(deep, max_num_seqs=16)
    some = [Job(prompt_of(12, seed=n % 4), greedy(40)) for n in range(12)]
    texts = [
        LearnedText(list(job.prompt), output)
        for job, output in zip(some, driver.tokens(some), strict=True)
    ]
    runner = driver.model.runner
    assert isinstance(runner, TorchRunner)
    settings = FitSettings(num_tokens=100, epochs=80, rate=2e-3)
    fit = Fit(runner, deep, settings)
    heads = {epoch: tmp_path / f"head{epoch}" for epoch in (1, settings.epochs)}
    for epoch, (head, ids) in enumerate(fit.run(texts), start=1):
        if epoch in heads:
            save(head, ids, runner, fit.taps, heads[epoch])
    untrained, trained = heads.values()
    stored = load_file(trained / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(100), stored["t2d"].nonzero().flatten())
    assert json.loads((trained / "config.json").read_text())["draft_vocab_size"] == 100
    # 0.60 of its drafts, and 0.01 of those of a head that has learned nothing
    assert _accepted(untrained, deep, some, texts) < 0.05
    assert _accepted(trained, deep, some, texts) > 0.4


def _accepted(head: Path, model: Path, jobs: list[Job], texts: list[LearnedText]) -> float:
    """Return the share of the head's drafts that is accepted. The streams have to be the texts."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    served = with_drafts(EngineDriver(model, speculative_config=config, max_num_seqs=16))
    assert served.tokens(jobs) == [text.output for text in texts]
    return served.drafts.accepted_tokens / served.drafts.draft_tokens


def test_models_that_no_head_is_fitted_to_are_refused(tiny: Tiny) -> None:
    shallow = tiny("llama").directory
    runner = EngineDriver(shallow).model.runner
    assert isinstance(runner, TorchRunner)
    with pytest.raises(ConfigError, match="less than 6 layers"):
        Fit(runner, shallow, FitSettings())
