"""Quantized checkpoints on a simulated GPU: tokens of the CPU, and what is decoded is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import prompt_of
from tests.fakes.virtual_device import virtual_gpu
from tokenmesh.engine.exec import build
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.quantization import read_quantization
from tokenmesh.engine.models.raw_config import read_json

JOBS = [Job(prompt_of(17), greedy(4))]
SIZES: dict[str, Any] = {
    "num_gpu_blocks_override": 14,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2}
    make_fake(Fake("Qwen2", sizes)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("scheme", "is_weight_only", "rounds"),
    [
        ("int8", False, True),
        ("int8", True, False),
        ("fp8_channel", False, True),
        ("fp8_channel", True, False),
        ("fbgemm", False, True),
        ("gptq8", False, False),
        ("bnb8", False, False),
    ],
)
def test_activations_are_rounded_where_the_checkpoint_says_so(
    source: Path, tmp_path: Path, scheme: str, is_weight_only: bool, rounds: bool
) -> None:
    write_checkpoint(source, tmp_path / "out", tmp_path / "plain", SCHEMES[scheme])
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    if is_weight_only:
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"] = None
        path.write_text(json.dumps(config))
    how = read_quantization(read_json(path))
    assert how is not None
    checkpoint = Checkpoint(tmp_path / "out", torch.device("cpu"))
    checkpoint.decode(how)
    names = [("model.layers.0.mlp.down_proj.weight", config["hidden_size"])]
    codes = checkpoint.take_codes(names, config["intermediate_size"])
    assert codes is not None
    assert codes.rounds_inputs == rounds


@pytest.mark.parametrize(
    ("scheme", "problem"),
    [
        ("gptq_desc_act", None),
        ("nf4", "its format has no codes"),
        ("fp8_block", "groups of 40 inputs are not multiples of 16"),
    ],
)
def test_tokens_are_those_of_the_cpu(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scheme: str,
    problem: str | None,
) -> None:
    # a separate test covers it
    monkeypatch.setattr(build, "warm_up", lambda runner, settings, max_model_len: None)
    out, plain = tmp_path / "out", tmp_path / "plain"
    write_checkpoint(source, out, plain, SCHEMES[scheme])
    expected = EngineDriver(out).tokens(JOBS)
    with torch.inference_mode(), virtual_gpu():
        assert EngineDriver(out, device="cuda", **SIZES).tokens(JOBS) == expected
    warned = [each.getMessage() for each in caplog.records if "are decoded" in each.getMessage()]
    assert len(warned) == (problem is not None)
    if problem is not None:
        assert problem in warned[0]
        assert "model.layers.0.mlp.down_proj" in warned[0]
