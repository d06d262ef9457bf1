"""Layers for further tokens of the models' own: they draft what their math says."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_draft_models import with_drafts
from tests.engine.test_drafts_of_families import TROUBLES, check_all, jobs
from tests.engine.test_eagle_heads import noted
from tests.engine.test_media_families import ImageFamily
from tests.engine.test_quantized_experts import FP8_BLOCK
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.media_models import media_checkpoint, oracle
from tests.fakes.mtp import FILE, PREDICTORS, add_module, make_predictor
from tests.fakes.quantized import write_checkpoint
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.errors import CheckpointError, ConfigError

K: Final = 3


def driver_of(directory: Path, method: str = "mtp", **settings: Any) -> EngineDriver:
    config = {"method": method, "num_speculative_tokens": K}
    return EngineDriver(directory, speculative_config=config, **{"max_num_seqs": 9, **settings})


@pytest.mark.timeout(60)  # the kernels of gated delta are compiled
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_head_drafts_what_its_math_says(tmp_path: Path, name: str) -> None:
    made = make_predictor(tmp_path, name)
    driver = with_drafts(
        driver_of(made.directory, max_num_batched_tokens=16), async_scheduling=False
    )
    found = noted(driver, Job(prompt_of(37, seed=5), greedy(24)))
    assert sum(len(drafts) for _, drafts in found) > 40
    with torch.no_grad():
        for known, drafts in found:
            assert drafts == made.chain(known, len(drafts))


STREAMS: Final = ("exaone_moe", "deepseek_v3", "qwen3_next")
"""One with windows, one with latents, one with states."""


@pytest.mark.timeout(60)  # as above
@pytest.mark.parametrize(
    "name", [*STREAMS, pytest.param("glm4_moe", marks=pytest.mark.slow, id="glm4_moe")]
)
def test_streams_are_the_same_with_a_head(tmp_path: Path, name: str) -> None:
    made = make_predictor(tmp_path, name)
    driver = driver_of(made.directory, **TROUBLES)
    check_all(driver, jobs(), 70 if name == "exaone_moe" else 34, ["model"])


@pytest.mark.timeout(60)  # as above
def test_a_head_has_the_positions_of_prompts_with_images(tmp_path: Path) -> None:
    directory = media_checkpoint(tmp_path, "qwen3_5")
    add_module(directory)
    config = {"method": "mtp", "num_speculative_tokens": K}
    parts = ImageFamily.parts(directory, speculative_config=config)
    family = ImageFamily(
        name="qwen3_5",
        model=oracle(directory, "qwen3_5"),
        processor=ItemProcessor(directory),
        **parts,
    )
    family.driver = with_drafts(family.driver, max_num_batched_tokens=40)
    runner = family.driver.model.runner
    assert isinstance(runner, TorchRunner)
    drafter: Any = runner.drafter
    head, seen = drafter.model, list[torch.Tensor | None]()

    class Noting:
        """Notes the positions that the head is given."""

        def __getattr__(self, name: str) -> Any:
            return getattr(head, name)

        def forward(self, hidden: torch.Tensor, step: Any, store: Any) -> torch.Tensor:
            seen.append(step.media.positions)
            return head.forward(hidden, step, store)  # type: ignore[no-any-return]

    drafter.model = Noting()
    prompts = [family.items(1), family.items(), family.items(2, 3)]
    found = family.driver.run(family.jobs(prompts))
    assert [each.token_ids for each in found] == family.answers(prompts)
    assert family.driver.drafts.draft_tokens > 20
    given = [each for each in seen if each is not None]
    assert {len(each) for each in given} == {3}
    # rows and columns of images have positions of their own
    assert any(not torch.equal(each[0], each[2]) for each in given)


def test_a_head_of_a_quantized_checkpoint_drafts_what_its_plain_weights_do(tmp_path: Path) -> None:
    made = make_predictor(tmp_path / "source", "deepseek_v3")
    pair = tmp_path / "quantized", tmp_path / "plain"
    write_checkpoint(made.directory, *pair, FP8_BLOCK)
    found = []
    for directory in pair:
        driver = with_drafts(driver_of(directory, native_kernels=False), async_scheduling=False)
        found.append(noted(driver, Job(prompt_of(37, seed=5), greedy(24))))
    assert found[0] == found[1]
    assert sum(len(drafts) for _, drafts in found[0]) > 40


def test_a_head_sleeps_and_wakes_with_its_model(tmp_path: Path) -> None:
    made = make_predictor(tmp_path, "glm4_moe")
    driver = with_drafts(driver_of(made.directory), async_scheduling=False)
    job = Job(prompt_of(20), greedy(12))
    expected = noted(driver, job)
    driver.sleep(2)
    driver.model.resident.wake(("weights", "kv_cache"))
    assert noted(driver, job) == expected


@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe"])
def test_a_model_without_the_tensors_of_a_head_is_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    made = make_predictor(tmp_path, name)
    file = made.directory / FILE
    place = "mtp." if made.kind.is_module else "model.layers.3."
    tensors = load_file(file)
    part = next(each for each in tensors if each.endswith(made.kind.names[2] + ".weight"))
    save_file({n: each for n, each in tensors.items() if n != part}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor mtp\..* is missing"):
        driver_of(made.directory)
    left = {n: each for n, each in tensors.items() if not n.startswith(place)}
    save_file(left, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has no tensors of {re.escape(place)}"):
        driver_of(made.directory)


def test_what_has_no_head_is_refused_at_the_start(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type is llama; MTP heads are of deepseek_v3"):
        driver_of(tiny("llama").directory)
    with pytest.raises(CheckpointError, match="model_type is qwen3_moe; MTP heads are of"):
        driver_of(tiny("qwen3_moe").directory)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is not set"):
        driver_of(tiny("exaone_moe").directory)
    several = make_predictor(tmp_path / "several", "glm4_moe", num_nextn_predict_layers=2)
    with pytest.raises(
        CheckpointError, match=r"is 2, .* num_speculative_tokens has to be 1, not 3"
    ):
        driver_of(several.directory)
    made = make_predictor(tmp_path / "none", "qwen3_next", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is not set"):
        driver_of(made.directory)
    config = {"method": "mtp", "model": str(tiny("llama").directory)}
    with pytest.raises(ConfigError, match=r"mtp is a head of .* itself, not of "):
        EngineDriver(made.directory, speculative_config=config)
