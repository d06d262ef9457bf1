"""Bad quantized checkpoints are refused; each error names file, tensor or key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import load
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES, compressed, floating, gptq, integer
from tokenmesh.engine.models.quantization import Quantization, read_quantization
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.config.model import ModelImpl
from tokenmesh.shared.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], object]
Written = Callable[[str], Path]

DOWN: Final = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2}
    make_fake(Fake("Llama", sizes)).save_pretrained(directory)
    return directory


@pytest.fixture
def written(source: Path, tmp_path: Path) -> Written:
    """A quantized checkpoint that a test may damage."""

    def write(scheme: str) -> Path:
        write_checkpoint(source, tmp_path / "model", tmp_path / "plain", SCHEMES[scheme])
        return tmp_path / "model"

    return write


def refusal(directory: Path, impl: ModelImpl = "auto") -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory, model_impl=impl)
    return error.value.message.replace(f"{directory}", "DIR")


def damaged(directory: Path, damage: Damage) -> Path:
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def without(part: str) -> Damage:
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., object]:
    name = f"{DOWN}.{part}"
    return lambda tensors: tensors.update({name: change(tensors[name])})


FILE: Final = f"DIR/model.safetensors: tensor {DOWN}"


@pytest.mark.parametrize(
    ("scheme", "damage", "message"),
    [
        ("gptq4", without("scales"), f"{FILE}.qweight has no scales next to it"),
        ("gptq4", without("qzeros"), f"{FILE}.qweight has no qzeros next to it"),
        ("gptq_desc_act", without("g_idx"), f"{FILE}.qweight has no g_idx next to it"),
        ("gptq4", without("qweight"), f"DIR: tensor {DOWN}.weight [64, 96] is missing"),
        (
            "gptq4",
            changed("scales", lambda t: t[:5]),
            f"{FILE}.scales has shape [5, 64]; {DOWN}.qweight asks for [6, 64]",
        ),
        (
            "gptq4",
            changed("qweight", lambda t: t[:11]),
            f"{FILE}.qweight has 88 inputs, which groups of 16 do not divide",
        ),
        (
            "gptq3",
            changed("qweight", lambda t: t[:8]),
            f"{FILE}.qweight has shape [8, 64], which words of 3 bits do not fill",
        ),
        (
            "gptq4",
            changed("g_idx", lambda t: t.flip(0)),
            f"{FILE}.g_idx is not in order, which the configuration does not say",
        ),
        (
            "gptq_desc_act",
            changed("g_idx", lambda t: t + 1),
            f"{FILE}.g_idx has groups that are not within the 6 of scales",
        ),
        (
            "gptq4",
            lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 96)}),
            f"{FILE}.weight is a weight that {DOWN}.qweight holds too",
        ),
        ("awq", without("scales"), f"{FILE}.qweight has no scales next to it"),
        (
            "awq",
            changed("qzeros", lambda t: t[:, :4]),
            f"{FILE}.qzeros has shape [6, 4]; {DOWN}.qweight asks for [6, 8]",
        ),
        ("pack4", without("weight_shape"), f"{FILE}.weight_packed has no weight_shape next to it"),
        (
            "pack4",
            changed("weight_shape", lambda t: t + 8),
            f"{FILE}.weight_shape is [72, 104], which {DOWN}.weight_packed [64, 12] does not hold",
        ),
        (
            "pack4_zeros",
            without("weight_zero_point"),
            f"{FILE}.weight_packed has no weight_zero_point next to it",
        ),
        (
            "fp8_block",
            without("weight_scale_inv"),
            f"{FILE}.weight has no weight_scale_inv next to it",
        ),
        (
            "fp8_block",
            changed("weight_scale_inv", lambda t: torch.ones(3, 4)),
            f"{FILE}.weight_scale_inv has shape [3, 4]; {DOWN}.weight asks for [3, 3]",
        ),
        (
            "fp8_block",
            lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(())}),
            f"{FILE}.weight_scale is stored together with {DOWN}.weight_scale_inv",
        ),
        (
            "fp8_channel",
            changed("weight_scale", lambda t: t[:9]),
            f"{FILE}.weight_scale has shape [9, 1]; {DOWN}.weight asks for [64, 1] or [64]",
        ),
        (
            "fp8_channel",
            changed("weight_scale", lambda t: t * torch.nan),
            f"{FILE}.weight has numbers that are infinite or NaN",
        ),
        (
            "fp8_channel",
            changed("weight", lambda t: t.float().to(torch.float8_e5m2)),
            f"{FILE}.weight has type F8_E5M2; supported are F32, F16, BF16",
        ),
        (
            "fp8_channel",
            lambda t: t.update({f"{DOWN}.pre_scale": torch.ones(2)}),
            f"DIR: unknown tensors: {DOWN}.pre_scale",
        ),
        (
            "fp8_channel",
            changed("weight", lambda t: t[:, :64]),
            f"{FILE}.weight has shape [64, 64]; config.json asks for [64, 96]",
        ),
        ("int8", without("weight_scale"), f"{FILE}.weight has no weight_scale next to it"),
        ("nvfp4", without("weight_global_scale"), "has no weight_global_scale next to it"),
        (
            "nvfp4",
            changed("weight_scale", lambda t: t.float()),
            f"{FILE}.weight_scale has type float32, not float8_e4m3fn",
        ),
        (
            "nf4",
            without("weight.quant_state.bitsandbytes__nf4"),
            f"{FILE}.weight has no weight.quant_state.bitsandbytes__nf4 next to it",
        ),
        (
            "nf4",
            changed("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1]),
            f"{FILE}.weight.quant_state.bitsandbytes__nf4 cannot be read",
        ),
        ("bnb8", changed("weight_format", lambda t: t + 1), f"{FILE}.weight_format is not 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_parts_that_do_not_fit_are_named(
    written: Written, scheme: str, damage: Damage, message: str
) -> None:
    assert message in refusal(damaged(written(scheme), damage))


@pytest.mark.parametrize(
    ("scheme", "damage", "message"),
    [
        ("gptq4", without("scales"), f"{FILE}.qweight has no scales next to it"),
        ("gptq4", without("qweight"), f"{FILE}.g_idx has type I32; supported are F32, F16"),
        (
            "fp8_channel",
            changed("weight", lambda t: t[:, :64]),
            f"{FILE}.weight has shape [64, 64]; config.json asks for [64, 96]",
        ),
    ],
)
def test_the_general_kind_names_them_too(
    written: Written, scheme: str, damage: Damage, message: str
) -> None:
    assert message in refusal(damaged(written(scheme), damage), "transformers")


def read(values: dict[str, Any], **more: Any) -> Quantization | None:
    return read_quantization(RawConfig({"quantization_config": values, **more}, "config.json"))


def group(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", {**integer(4, "group", group_size=16), **weights})


def with_group(**values: Any) -> dict[str, Any]:
    config = group()
    config["config_groups"] = {"group_0": {**config["config_groups"]["group_0"], **values}}
    return config


AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; supported are awq, bitsandbytes"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm', which is not supported; convert it to"),
        ({"quant_method": "bitblas"}, "convert it to pack-quantized of compressed-tensors or to"),
        (gptq(4, checkpoint_format="marlin_24"), "checkpoint_format is 'marlin_24', which is not"),
        (gptq(4, is_marlin_format=True), "is_marlin_format is set, which is not supported; conve"),
        ({**group(), "format": "marlin-24"}, "format is 'marlin-24', which is not supported; conv"),
        ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', which only gpt_oss has"),
        (gptq(5), "bits is 5; supported is 2, 3, 4, 8"),
        (gptq(4, group_size=-2), "group_size is -2, not a whole number of at least -1"),
        (gptq(4, method="awq"), "method is 'awq'; supported is 'gptq'"),
        (gptq(4, rotation="hadamard"), "rotation is 'hadamard', which is not known"),
        (gptq(4, dynamic={"+:(": {}}), "dynamic: +:( has '(', which is not a regular expression"),
        (gptq(4, dynamic={"+:a": {"bits": 7}}), "dynamic: +:a: bits is 7; supported is 2, 3"),
        (gptq(4, dynamic={"a": {"wobble": 7}}), "dynamic: a: wobble is 7, which is not known"),
        ({"quant_method": "fp8", "ignored_layers": ["(*"]}, "ignored_layers has '(?:(*)"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported is 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point is False; supported is True"),
        ({**AWQ, "bits": 8}, "bits is 8; supported is 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported is 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "is not a list of 2 entries"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        ({"quant_method": "modelopt"}, "quant_algo is None; supported is 'FP8', "),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit and load_in_8bit are both False"),
        (group(num_bits=3), "group_0: format is 'pack-quantized' of 3 bits (int); supported are"),
        (group(strategy="token"), "weights: strategy is 'token'; supported is 'tensor', 'channel'"),
        (group(actorder="wobble"), "weights: actorder is 'wobble'; supported is"),
        (group(group_size=None), "group_size is -1, which strategy 'group' does not allow"),
        (group(dynamic=True), "weights: dynamic is True; supported is False"),
        (group(wobble=1), "group_0: weights: wobble is 1, which is not known"),
        (with_group(output_activations={"num_bits": 8}), "output_activations is set; quantized"),
        (with_group(targets=["Conv2d"]), "targets names the class Conv2d; supported are names"),
        (with_group(targets=["re:("]), "targets has '(', which is not a regular expression"),
        (with_group(targets="Linear"), "targets is not a list of names"),
        ({**group(), "quantization_status": "calibration"}, "quantization_status is 'calibration'"),
        (
            {**group(), "sparsity_config": {"format": "sparse"}},
            "sparsity_config: format is 'sparse'",
        ),
        ({**group(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config is set"),
        ({**group(), "config_groups": None}, "config_groups is missing"),
        ({**group(), "ignore": ["re:["]}, "ignore has '[', which is not a regular expression"),
        (compressed("dense", floating(8, "tensor")), "format is 'dense' of 8 bits (float)"),
        (compressed("float-quantized", floating(8, "block")), "block_structure is None, not rows"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_understood_is_named(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read(values)
    assert error.value.message.startswith("config.json: quantization_config: ")
    assert message in error.value.message


def test_names_count_before_classes_and_ignored_modules_are_plain() -> None:
    config = group()
    named = {
        "targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"],
        "weights": integer(8, "channel"),
    }
    config["config_groups"]["group_1"] = named
    config["ignore"] = ["lm_head", "re:.*layers\\.1\\..*gate_proj"]
    how = read(config)
    assert how is not None
    bits = {
        name: getattr(how.format_of(name), "bits", None)
        for name in (
            *("lm_head", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate_proj"),
            *("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"),
            *("model.layers.1.mlp.up_proj", "lm_head.more"),
        )
    }
    assert list(bits.values()) == [None, None, 4, 8, 8, 4, 4]


def test_the_first_dynamic_rule_that_matches_a_module_counts() -> None:
    dynamic = {
        "-:.*\\.0\\..*down": {},
        "+:.*down": {"bits": 8, "group_size": 32},
        ".*up": {"desc_act": True},
        ".*": {"group_size": -1},
    }
    how = read(gptq(4, dynamic=dynamic))
    assert how is not None
    assert how.format_of("model.layers.0.mlp.down_proj") is None
    seen = []
    for name in ("layers.1.down_proj", "layers.1.up_proj", "layers.0.q_proj"):
        form: Any = how.format_of(name)
        seen.append((form.bits, form.group_size, form.has_order))
    assert seen == [(8, 32, False), (4, 16, True), (4, -1, False)]


def test_names_in_lists_of_modules_stand_for_parts_of_paths() -> None:
    names = ["lm_head", "model.layers.1", "q_proj", "model.layers.*.mlp"]
    how = read({"quant_method": "fp8", "modules_to_not_convert": names})
    assert how is not None
    plain = ("lm_head", "model.layers.1.self_attn.k_proj", "model.layers.4.self_attn.q_proj")
    assert [how.format_of(each) for each in plain] == [None] * 3
    assert how.format_of("model.layers.3.mlp.up_proj") is None
    assert how.format_of("model.layers.11.self_attn.k_proj") is not None


def test_a_language_model_may_hold_the_configuration_and_plain_ones_have_none() -> None:
    text = {"quantization_config": gptq(4)}
    assert read_quantization(RawConfig({"text_config": text}, "config.json")) is not None
    assert read_quantization(RawConfig({"compression_config": group()}, "config.json")) is not None
    assert read_quantization(RawConfig({"text_config": {}}, "config.json")) is None


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_only_a_bias_of_zeros_may_be_left_over(written: Written, impl: ModelImpl) -> None:
    directory = written("gptq4")
    damaged(directory, lambda t: t.update({f"{DOWN}.bias": torch.zeros(64).half()}))
    load(directory, model_impl=impl)
    damaged(directory, changed("bias", lambda t: t + (torch.arange(64) == 9).half()))
    assert f"tensors: {DOWN}.bias" in refusal(directory, impl)


def test_a_quantized_head_is_loaded(source: Path, tmp_path: Path) -> None:
    pair = tmp_path / "quantized", tmp_path / "plain"
    scheme = SCHEMES["gptq4"]
    write_checkpoint(source, *pair, scheme)
    tensors = load_file(pair[0] / "model.safetensors")
    parts, _ = scheme.write(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}
    save_file(tensors, pair[0] / "model.safetensors")
    raw = json.loads((pair[0] / "config.json").read_text())
    raw["quantization_config"]["lm_head"] = True
    (pair[0] / "config.json").write_text(json.dumps(raw))
    load(pair[0])


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
            {"tile": (128, 128)},
        ),
        (
            {
                "activation_scheme": "static",
                "dequantize": False,
                "modules_to_not_convert": ["model.vision_tower", "lm_head"],
                "quant_method": "fp8",
                "weight_block_size": None,
            },
            {"tile": (0, 0)},
        ),
        (
            {
                "config_groups": {
                    "group_0": {
                        "input_activations": {"dynamic": True, "num_bits": 8, "type": "int"},
                        "output_activations": None,
                        "targets": ["Linear"],
                        "weights": {
                            "actorder": None,
                            "block_structure": None,
                            "dynamic": False,
                            "group_size": None,
                            "num_bits": 8,
                            "observer": "mse",
                            "observer_kwargs": {},
                            "strategy": "channel",
                            "symmetric": True,
                            "type": "int",
                        },
                    }
                },
                "format": "int-quantized",
                "global_compression_ratio": 1.24,
                "ignore": ["lm_head"],
                "kv_cache_scheme": None,
                "quant_method": "compressed-tensors",
                "quantization_status": "frozen",
                "sparsity_config": {},
                "transform_config": {},
                "version": "0.12.2",
            },
            {"tile": (1, 0), "is_symmetric": True},
        ),
        (
            {
                "batch_size": 1,
                "bits": 4,
                "damp_percent": 0.01,
                "desc_act": False,
                "exllama_config": {"version": 1},
                "group_size": 128,
                "modules_in_block_to_quantize": None,
                "quant_method": "gptq",
                "sym": True,
                "true_sequential": True,
                "use_cuda_fp16": False,
                "use_exllama": True,
            },
            {"bits": 4, "group_size": 128, "has_order": False, "zero_offset": 1},
        ),
        (
            {
                "backend": "autoawq",
                "bits": 4,
                "do_fuse": False,
                "exllama_config": None,
                "group_size": 64,
                "modules_to_not_convert": ["visual"],
                "quant_method": "awq",
                "version": "GEMM",
                "zero_point": True,
            },
            {"group_size": 64},
        ),
    ],
    ids=["deepseek", "static", "int8", "gptq", "awq"],
)
def test_configurations_as_they_are_published_are_read(
    values: dict[str, Any], form: dict[str, Any]
) -> None:
    how = read(values)
    assert how is not None
    assert how.format_of("lm_head") is None or "lm_head" not in str(values)
    found = how.format_of("model.layers.3.mlp.experts.7.up_proj")
    assert {name: getattr(found, name) for name in form} == form
