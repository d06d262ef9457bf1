"""Any architecture that transformers generates text with is exact or refused with a reason."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Final

import pytest
import torch
import transformers

from tests.fakes.any_architecture import CannotMake, kinds, make_checkpoint
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.family_configs import checkpoint_of, config_of
from tests.fakes.tiny import prompt_of
from tokenmesh.shared.errors import CheckpointError

SEED: Final = 2
FEW: Final = 10
NUM_TOKENS: Final = 16
PROMPTS: Final = [prompt_of(37), prompt_of(20, seed=2)]


def outcome(directory: Path, config_class: type) -> str:
    """Name the result for an architecture; an AssertionError when we compute something else."""
    try:
        oracle = make_checkpoint(directory, config_class)
    except CannotMake:
        return "not made"
    try:
        driver = EngineDriver(
            directory,
            model_impl="transformers",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=11,
        )
    except CheckpointError as refusal:
        return "refused" if "cannot be served: " in refusal.message else refusal.message
    tokens = driver.tokens([Job(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS])
    for prompt, ours in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *ours[:-1]]])
            logits = oracle(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == ours
    return "exact"


@pytest.mark.parametrize("number", range(FEW))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_an_architecture_at_random_is_exact_or_refused(tmp_path: Path, number: int) -> None:
    names = sorted(kinds())
    Random(SEED).shuffle(names)
    assert outcome(tmp_path, kinds()[names[number]]) in ("exact", "refused")


@pytest.mark.parametrize("name", ["afmoe", "flex_olmo", "glm_moe_dsa", "mimo_v2_flash"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_an_architecture_that_the_page_names_is_exact(tmp_path: Path, name: str) -> None:
    assert outcome(tmp_path, kinds()[name]) == "exact"
    page = Path("docs/models.md").read_text()
    assert f"`{transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kinds()[name]].__name__}`" in page


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("jetmoe", "the code of JetMoeTopKGating reads numbers off tensors, which a pass without"),
        (
            "llama4_text",
            "its mask of size 16 depends on more than two positions, as that of",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    make_checkpoint(tmp_path, kinds()[name])
    with pytest.raises(CheckpointError) as error:
        EngineDriver(tmp_path, model_impl="transformers")
    assert f"cannot be served: {reason}" in error.value.message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_weights_are_those_that_are_stored_where_transformers_would_scale_them(
    tmp_path: Path,
) -> None:
    oracle = make_checkpoint(tmp_path, kinds()["mamba2"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["rescale_prenorm_residual"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver = EngineDriver(tmp_path, max_model_len=128)
    (ours,) = driver.tokens([Job(PROMPTS[0], greedy(NUM_TOKENS))])
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[0], *ours[:-1]]])
        logits = oracle(ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 :]
    assert logits.argmax(-1).tolist() == ours


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_native_family_with_another_activation_is_of_the_general_kind(
    tmp_path: Path, architecture: str
) -> None:
    checkpoint = checkpoint_of(tmp_path, config_of(architecture, hidden_act="gelu"))
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS]
    assert EngineDriver(tmp_path).tokens(jobs) == checkpoint.greedy(PROMPTS, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800)
def test_every_architecture_is_exact_or_refused(tmp_path: Path) -> None:
    found = {name: outcome(tmp_path / name, kind) for name, kind in kinds().items()}
    counts = Counter(found.values())
    assert counts.keys() <= {"exact", "refused", "not made"}
    assert counts["exact"] >= 96
    assert counts["not made"] < 50
