"""SCHEMES: every quantized format that is read, as published checkpoints configure it."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from tests.fakes.quantized import (
    BLOCK,
    GROUP,
    Scheme,
    write_awq,
    write_bnb4,
    write_bnb8,
    write_fp8,
    write_fp8_powers,
    write_gptq,
    write_int8,
    write_int8_zeros,
    write_mxfp4,
    write_mxfp8,
    write_nvfp4,
    write_packed,
    write_static_fp8,
)


def compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """compressed-tensors with one group of all linear layers."""
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "global_compression_ratio": 1.5,
        **more,
    }


def integer(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Weights of compressed-tensors."""
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


def floating(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """The same of floating point."""
    return {**integer(bits, strategy, **more), "type": "float", "dynamic": False}


def gptq(bits: int, **more: Any) -> dict[str, Any]:
    """Return a config of GPTQ's first version."""
    known = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False}
    return {**known, "sym": False, "damp_percent": 0.01, "checkpoint_format": "gptq", **more}


_BNB4: Final = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
}
_SKIPPED: Final = {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
_KV: Final = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_KV_SCALES: Final = {
    "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
    "model.layers.0.self_attn.v_scale": torch.tensor(0.25),
}

SCHEMES: Final[Mapping[str, Scheme]] = {
    "fp8_tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        write_static_fp8,
    ),
    "fp8_block": Scheme(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
            **_SKIPPED,
        },
        write_fp8(*BLOCK, "weight_scale_inv"),
    ),
    "fp8_block_powers": Scheme(
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"},
        write_fp8_powers,
    ),
    "fp8_channel": Scheme(
        compressed("float-quantized", floating(8, "channel"), kv_cache_scheme=_KV),
        write_fp8(1, 0, "weight_scale"),
        more=_KV_SCALES,
    ),
    "fp8_naive": Scheme(
        compressed("naive-quantized", floating(8, "tensor")),
        write_fp8(0, 0, "weight_scale", "one"),
    ),
    "fp8_block_ct": Scheme(
        compressed("float-quantized", floating(8, "block", block_structure=list(BLOCK))),
        write_fp8(*BLOCK, "weight_scale"),
    ),
    "fbgemm": Scheme(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, **_SKIPPED},
        write_fp8(1, 0, "weight_scale"),
    ),
    "modelopt_fp8": Scheme(
        {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*gate"],
        },
        write_static_fp8,
        file="hf_quant_config.json",
    ),
    "gptq2": Scheme(gptq(2), write_gptq(2)),
    "gptq3": Scheme(gptq(3), write_gptq(3)),
    "gptq4": Scheme(gptq(4), write_gptq(4)),
    "gptq8": Scheme(gptq(8), write_gptq(8)),
    "gptq_desc_act": Scheme(gptq(4, desc_act=True), write_gptq(4, is_shuffled=True)),
    "gptq_v2": Scheme(gptq(4, checkpoint_format="gptq_v2"), write_gptq(4, lacks=0)),
    "awq": Scheme(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        write_awq,
    ),
    "pack4": Scheme(
        compressed("pack-quantized", integer(4, "group", group_size=GROUP)), write_packed(4)
    ),
    "pack4_zeros": Scheme(
        compressed("pack-quantized", integer(4, "group", group_size=GROUP, symmetric=False)),
        write_packed(4, has_zeros=True),
    ),
    "pack4_actorder": Scheme(
        compressed("pack-quantized", integer(4, "group", group_size=GROUP, actorder="group")),
        write_packed(4, is_shuffled=True),
    ),
    "pack8_channel": Scheme(
        compressed("pack-quantized", integer(8, "channel")), write_packed(8, group_size=0)
    ),
    "int8": Scheme(compressed("int-quantized", integer(8, "channel")), write_int8),
    "int8_zeros": Scheme(
        compressed("int-quantized", integer(8, "channel", symmetric=False)), write_int8_zeros
    ),
    "nf4": Scheme({**_BNB4, "bnb_4bit_use_double_quant": False}, write_bnb4(is_nested=False)),
    "nf4_nested": Scheme(_BNB4, write_bnb4(is_nested=True)),
    "bnb8": Scheme(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, write_bnb8
    ),
    "nvfp4": Scheme(
        compressed("nvfp4-pack-quantized", floating(4, "tensor_group", group_size=16)),
        write_nvfp4("weight_packed", "weight_global_scale", is_divided=True),
    ),
    "nvfp4_modelopt": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        write_nvfp4("weight", "weight_scale_2", is_divided=False),
    ),
    "mxfp4": Scheme(
        compressed("mxfp4-pack-quantized", floating(4, "group", group_size=32)), write_mxfp4
    ),
    "mxfp8": Scheme({"quant_method": "modelopt", "quant_algo": "MXFP8"}, write_mxfp8),
}
