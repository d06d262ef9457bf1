"""GPTQ: less error in products than rounding to the nearest, and checkpoints that are served."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.engine.test_quantized import check
from tests.fakes.models import Fake, make_fake
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.cli.quantize import quantize as command
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.quantization import read_quantization, write
from tokenmesh.engine.models.quantization.calibrate import Calibration, Calibrator
from tokenmesh.engine.models.quantization.gptq import (
    GptqSpec,
    Hessian,
    Plan,
    relative_error,
    rounded_by_gptq,
)
from tokenmesh.engine.models.raw_config import read_json

LAYERS: Final = 2
TEXT: Final = "the quick brown fox jumps over the lazy dog, " * 60
GROUP: Final = 32


def correlated(count: int, inputs: int) -> torch.Tensor:
    """Inputs that mostly lie in few directions, as those of a trained model do."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(8, inputs, generator=generator)
    some = torch.randn(count, 8, generator=generator) @ mixing
    return some + 0.3 * torch.randn(count, inputs, generator=generator)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("bits", "inputs", "group_size", "is_symmetric"),
    [(4, 192, 32, True), (4, 384, 192, True), (4, 256, 64, False), (8, 192, None, True)],
)
def test_products_have_less_error_than_with_rounding_to_the_nearest(
    bits: int, inputs: int, group_size: int | None, is_symmetric: bool, act_order: bool
) -> None:
    x = correlated(500, inputs)
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    hessian = Hessian.of(inputs)
    for part in torch.split(x, 150):
        hessian.add(part)
    torch.testing.assert_close(hessian.total, x.T @ x, rtol=1e-4, atol=1e-2)
    spec = GptqSpec(bits, group_size, is_symmetric, act_order)
    ours = rounded_by_gptq(weight, Plan.of(hessian.total, act_order), spec)
    # with inputs that do not depend on each other there is nothing to compensate
    nearest = rounded_by_gptq(weight, Plan.of(torch.eye(inputs), act_order), spec)
    steps = nearest.scales.abs().amax()
    assert (nearest.decoded() - weight).abs().amax() <= steps
    errors = [
        float((x @ (each.decoded() - weight).T).square().sum() / (x @ weight.T).square().sum())
        for each in (ours, nearest)
    ]
    assert errors[0] < 0.7 * errors[1]
    stated = relative_error(weight, ours.decoded(), hessian.total)
    assert stated == pytest.approx(errors[0], rel=1e-2)
    assert int(ours.numbers.max()) < 1 << bits


def test_inputs_that_are_always_zero_are_rounded_to_the_nearest() -> None:
    x = correlated(100, 64)
    x[:, 5] = 0
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    for hessian in (x.T @ x, torch.zeros(64, 64)):
        spec = GptqSpec(4, 32)
        found = rounded_by_gptq(weight, Plan.of(hessian, act_order=True), spec)
        change = (found.decoded() - weight)[:, 5].abs()
        assert (change <= 0.5001 * found.scales[:, 0].abs()).logical_or(change < 0.5).all()
        assert found.decoded().isfinite().all()


def test_inputs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="infinite or NaN"):
        Plan.of(torch.full((4, 4), torch.inf), act_order=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections read correlated inputs, with a tokenizer."""
    directory = tmp_path_factory.mktemp("source")
    sizes = {"vocab_size": 400, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    model: Any = make_fake(Fake("Qwen2", sizes))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        table = model.get_input_embeddings().weight
        low = torch.randn(len(table), 6, generator=generator)
        table.copy_(0.4 * low @ torch.randn(6, table.shape[1], generator=generator))
        table += 0.2 * torch.randn(table.shape, generator=generator)
    byte_level_bpe(directory)
    model.save_pretrained(directory)
    (directory / "text").write_text(TEXT)
    return directory


def quantize(source: Path, out: Path, *options: str) -> Path:
    assert write.main([str(source), str(out), "--format", *options]) == 0
    return out


def decoded(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a quantized checkpoint by their plain names."""
    checkpoint = Checkpoint(directory)
    how = read_quantization(read_json(directory / "config.json"))
    assert how is not None
    checkpoint.decode(how)
    return {
        name: checkpoint.take(name, shape, torch.float32)
        for name, shape in checkpoint.shapes().items()
    }


def errors_by_layer(source: Path, weights: dict[str, torch.Tensor]) -> list[float]:
    """The squared error of all projections' outputs on the text, for each layer."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found: dict[int, float] = defaultdict(float)

    def observe(name: str, module: torch.nn.Linear) -> None:
        change = weights[f"{name}.weight"] - module.weight

        def hook(_: object, inputs: tuple[torch.Tensor]) -> None:
            found[int(name.split(".")[2])] += float((inputs[0] @ change.T).square().mean())

        module.register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            observe(name, module)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with torch.no_grad():
        model(torch.tensor(tokenizer.encode(TEXT).ids[:256])[None])
    return [found[number] for number in range(LAYERS)]


CALIBRATED: Final = ("--method", "gptq", "--calibration", "text", "--calibration-tokens", "2048")


@pytest.mark.parametrize(
    "options",
    [
        ("int4", "--group-size", "32"),
        ("int4", "--group-size", "16", "--no-act-order", "--asymmetric"),
        ("int8",),
    ],
    ids=lambda options: "-".join(options).replace("--", ""),
)
def test_every_layer_of_a_written_copy_has_less_error_and_is_served(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(source)
    if "--asymmetric" in options:
        monkeypatch.setattr(write, "MOST_BYTES", 20_000)
    out = quantize(source, tmp_path / "gptq", *options, *CALIBRATED)
    assert ("--asymmetric" in options) == (len(list(out.glob("model-rest-*"))) > 1)
    nearest = quantize(source, tmp_path / "nearest", options[0])
    weights = decoded(out)
    ours, theirs = (errors_by_layer(source, each) for each in (weights, decoded(nearest)))
    assert len(ours) == LAYERS
    assert all(mine < 0.9 * other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copyfile(source / "config.json", plain / "config.json")
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    check(out, plain)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_prompts_begin_as_those_of_the_model_and_fit_it(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    file = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    start = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.post_processor = start
    tokenizer.enable_truncation(7)
    tokenizer.save(file)
    how = Calibration(source / "text", 600, GptqSpec(8, None))
    hidden = Calibrator.open(tmp_path, read_json(tmp_path / "config.json"), how).hidden
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    tokenizer.no_truncation()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids[:510]
    # 256 is the model's longest sequence
    for number, prompt in enumerate(hidden):
        expected = table[[1, *ids[255 * number : 255 * (number + 1)]]]
        torch.testing.assert_close(prompt, expected)
    assert len(hidden) == 2


def test_what_cannot_be_calibrated_is_refused_with_a_reason(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(source / "text", "text")
    Path("empty").write_text("")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    bare, other, small = Path("bare"), Path("other"), Path("small")
    for each in (bare, other, small):
        shutil.copytree(source, each)
    (bare / "tokenizer.json").unlink()
    raw = json.loads((source / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**raw, "architectures": ["FooForCausalLM"]}))
    broken = load_file(small / "model.safetensors")
    broken["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(broken, small / "model.safetensors")
    gptq = ("--method", "gptq", "--calibration")
    for model, options, reason in (
        (source, ("fp8", *gptq, "text"), "fp8 is rounded to the nearest"),
        (source, ("int4", "--method", "gptq"), "needs --calibration FILE"),
        (source, ("int4", "--group-size", "32"), "--group-size is for --method gptq"),
        (source, ("int8", *gptq, "text", "--asymmetric"), "--asymmetric is for --format int4"),
        (source, ("int4", *gptq, "none", "--group-size", "32"), "none cannot be read"),
        (source, ("int4", *gptq, "binary", "--group-size", "32"), "binary cannot be read"),
        (source, ("int4", *gptq, "empty", "--group-size", "32"), "has 0 tokens"),
        (source, ("int4", *gptq, "text", "--group-size", "24"), "not a multiple of 16"),
        (source, ("int4", *gptq, "text", "--group-size", "64"), "groups of 64 do not divide"),
        (bare, ("int8", *gptq, "text"), "holds no tokenizer.json"),
        (other, ("int8", *gptq, "text"), "FooForCausalLM"),
        (small, ("int8", *gptq, "text"), "layers.1.mlp.down_proj.weight has numbers"),
        (small, ("int8",), "layers.1.mlp.down_proj.weight has numbers"),
    ):
        assert write.main([str(model), "out", "--format", *options]) == 1
        assert reason in capsys.readouterr().err
        assert not Path("out").exists()


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(arguments: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.append(arguments)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    given = ["--format", "int4", "--method", "gptq", "--calibration", "text"]
    given += ["--calibration-tokens", "512", "--group-size", "64"]
    app = typer.Typer()
    app.command()(command)
    given += ["--asymmetric", "--no-act-order"]
    result = CliRunner().invoke(app, ["m", "out", *given])
    assert result.exit_code == 0, result.output
    (arguments,) = seen
    assert arguments[0] == sys.executable
    assert arguments[3:] == [*given, "--", "m", "out"]
