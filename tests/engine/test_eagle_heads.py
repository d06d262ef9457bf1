"""Heads of EAGLE and EAGLE-3: they draft what their math says, and change no stream."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_draft_models import with_drafts
from tests.engine.test_drafts import check, jobs
from tests.fakes.eagle import TinyHead, make_head
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.ops.native import needs_native
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.kernels.native import NativeCodes, has_started
from tokenmesh.shared.errors import CheckpointError, ConfigError

K: Final = 3
HEADS: Final[dict[str, dict[str, Any]]] = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "some tokens": {"kind": "eagle3", "drafted": 90, "layer": "layers.0.", "prefix": "model."},
    "own embedding": {"kind": "eagle3", "with_embedding": True, "norm_before_residual": True},
    "another size": {
        "kind": "eagle3",
        "hidden_size": 48,
        "with_embedding": True,
        "target_hidden_size": 64,
    },
    "two states": {"kind": "eagle3", "taps": (2, 0)},
}


def driver_of(target: Path, head: TinyHead, **settings: Any) -> EngineDriver:
    config = {"method": head.kind, "model": str(head.directory), "num_speculative_tokens": K}
    return EngineDriver(target, speculative_config=config, max_num_seqs=9, **settings)


def states_of(target: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """The input of each layer and the final states, as transformers has them."""
    with torch.no_grad():
        found = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [each[0] for each in found]


def noted(driver: EngineDriver, job: Job) -> list[tuple[list[int], list[int]]]:
    """Run a job; the tokens that were known and what was drafted behind them, of each step."""
    runner = driver.model.runner
    assert isinstance(runner, TorchRunner)
    assert runner.drafter is not None
    drafter, found = runner.drafter, list[tuple[list[int], list[int]]]()
    propose = type(drafter).propose

    class Noting:
        """Notes what the drafter proposes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(drafter, name)

        def propose(self, *given: Any) -> dict[int, list[int]]:
            drafts = propose(drafter, *given)
            for row, ids in drafts.items():
                found.append((list(drafter.rows[row].token_ids), ids))
            return drafts

    runner.drafter = Noting()  # type: ignore[assignment]
    try:
        driver.tokens([job])
    finally:
        runner.drafter = drafter
    return found


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        # a head gets the same states of its model from all three
        pytest.param(
            name, impl, marks=() if impl == "native" or name == "eagle3" else pytest.mark.slow
        )
        for name in HEADS
        for impl in ("native", "torch", "general")
    ],
)
def test_a_head_drafts_what_its_math_says(tiny: Tiny, tmp_path: Path, name: str, impl: str) -> None:
    target: TinyCheckpoint = tiny("llama")
    head = make_head(tmp_path / "head", **HEADS[name])
    kinds: dict[str, Any] = {
        "native": {},
        "torch": {"native_kernels": False},
        "general": {"model_impl": "transformers"},
    }
    driver = with_drafts(
        driver_of(target.directory, head, max_num_batched_tokens=16, **kinds[impl]),
        async_scheduling=False,
    )
    runner: Any = driver.model.runner
    # it is compared with the same math where the C kernels compute and where torch does
    assert (runner.drafter.model.program is not None) == (has_started() and impl != "torch")
    found = noted(driver, Job(prompt_of(37, seed=5), greedy(24)))
    oracle = target.make_oracle()
    assert sum(len(drafts) for _, drafts in found) > 40
    with torch.no_grad():
        for known, drafts in found:
            assert drafts == head.chain(known, states_of(oracle, known), oracle, len(drafts))


@pytest.mark.parametrize("name", ["eagle", "some tokens"])
def test_streams_are_the_same_with_a_head(tiny: Tiny, tmp_path: Path, name: str) -> None:
    directory = tiny("llama").directory
    head = make_head(tmp_path / "head", **HEADS[name])
    expected = EngineDriver(directory, max_num_seqs=9).run(jobs())
    driver = driver_of(directory, head, max_num_batched_tokens=64)
    drafted = with_drafts(driver)
    check(drafted.run(jobs(), steps_between=1), expected)
    assert drafted.drafts.draft_tokens > 300
    tight = with_drafts(driver, num_blocks=9, kv_watermark=0.0)
    outcomes = tight.run(jobs())
    check(outcomes, expected)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 5


@needs_native
def test_a_head_of_a_quantized_model_is_rounded_as_well(tiny: Tiny, tmp_path: Path) -> None:
    """It drafts nearly what its plain weights do, and changes no stream."""
    directory, head = tiny("llama").directory, make_head(tmp_path / "head", **HEADS["eagle3"])
    driver = driver_of(directory, head, quantization="int8")
    runner = driver.model.runner
    assert isinstance(runner, TorchRunner)
    assert runner.drafter is not None
    made: Any = runner.drafter.model
    assert isinstance(made.head.weight, NativeCodes)
    assert isinstance(made.merge.weight, NativeCodes)
    expected = EngineDriver(directory, max_num_seqs=9, quantization="int8").run(jobs())
    drafted = with_drafts(driver)
    check(drafted.run(jobs(), steps_between=1), expected)
    assert drafted.drafts.draft_tokens > 300


def test_a_head_sleeps_and_wakes_with_its_model(tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny("llama").directory
    head = make_head(tmp_path / "head", "eagle3")
    driver = with_drafts(driver_of(directory, head), async_scheduling=False)
    job = Job(prompt_of(20), greedy(12))
    expected = noted(driver, job)
    assert driver.sleep(2) > 0
    driver.model.resident.wake(("weights", "kv_cache"))
    assert noted(driver, job) == expected


def test_more_drafts_than_a_head_was_trained_for_are_asked_for_by_name(
    tiny: Tiny, tmp_path: Path
) -> None:
    method = {"proposal_type": "greedy", "speculative_tokens": 2}
    speculators = {"proposal_methods": [method], "default_proposal_method": "greedy"}
    head = make_head(tmp_path / "head", "eagle3", speculators_config=speculators)
    config = {"method": "eagle3", "model": str(head.directory), "num_speculative_tokens": 3}
    directory = tiny("llama").directory
    with pytest.raises(ConfigError, match="was trained for 2 drafts, not 3"):
        EngineDriver(directory, speculative_config=config)
    EngineDriver(directory, speculative_config={**config, "num_speculative_tokens": 2})
    EngineDriver(directory, speculative_config={**config, "allow_more_than_trained": True})


def changed(head: TinyHead, **values: Any) -> TinyHead:
    """Write other values to its config."""
    file = head.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return head


def test_what_is_no_head_for_the_model_is_refused_at_the_start(tiny: Tiny, tmp_path: Path) -> None:
    llama = tiny("llama").directory

    def third(name: str, **config: Any) -> TinyHead:
        return make_head(tmp_path / name, "eagle3", **config)

    with pytest.raises(CheckpointError, match="model_type is mistral; EAGLE-3 heads are for llama"):
        driver_of(tiny("mistral").directory, third("mistral"))
    with pytest.raises(CheckpointError, match="has 3; the model has layers 0 to 2"):
        driver_of(llama, changed(third("layers"), eagle_aux_hidden_state_layer_ids=[0, 1, 3]))
    with pytest.raises(ConfigError, match=r"vocabulary of 150 tokens, and that of .* has 160"):
        driver_of(llama, third("small", vocab_size=150))
    with pytest.raises(CheckpointError, match="another size than 48"):
        driver_of(llama, third("narrow", hidden_size=48))
    with pytest.raises(CheckpointError, match="no d2t that says which of 160"):
        driver_of(llama, without_names(third("nameless", drafted=90)))
    head = third("head")
    whole = {"method": "draft_model", "model": str(head.directory)}
    with pytest.raises(ConfigError, match="is a head, not a model: its method is eagle3"):
        EngineDriver(llama, speculative_config=whole)
    config = {"method": "eagle3", "model": str(llama)}
    with pytest.raises(CheckpointError, match="is missing"):
        EngineDriver(llama, speculative_config=config)
    config = {"method": "eagle", "model": str(head.directory)}
    config["eagle_aux_hidden_state_layer_ids"] = [1]  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="is for heads of EAGLE-3"):
        EngineDriver(llama, speculative_config=config)


def without_names(head: TinyHead) -> TinyHead:
    """Leave out which tokens it drafts."""
    file = head.directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["d2t"]
    save_file(tensors, file)
    return head
