"""Adapters in PEFT's format, written by hand, and models that they are merged into."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
EXPERTS = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Parameters of stacked experts, and what PEFT puts behind the module's name for each."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Describes an adapter to write."""

    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                              "down_proj")  # fmt: skip
    """Last parts of the names of linear layers."""
    rank: int = 4
    alpha: float = 8
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of adapter_config.json."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """rank_pattern."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """alpha_pattern."""
    size: float = 0.3
    """The size of what it adds to the base weights."""
    dtype: torch.dtype = torch.float32
    experts: bool = False
    """Also for the parameters of all experts."""


def _of(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, default)


def write_adapter(model: Any, directory: Path, spec: AdapterSpec = AdapterSpec()) -> Path:
    """An adapter of random numbers for the linear layers of a model of transformers."""
    generator = torch.Generator().manual_seed(spec.seed)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] not in spec.modules:
            continue
        rank = _of(spec.ranks, name, spec.rank)
        outputs, inputs = module.weight.shape
        a, b = _pair(outputs, inputs, rank, 1, spec, generator)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b
    for name, module in model.named_modules() if spec.experts else ():
        for parameter, wrapper in EXPERTS.items():
            weight = dict(module.named_parameters(recurse=False)).get(parameter)
            if weight is not None and weight.dim() == 3:
                count, outputs, inputs = weight.shape
                rank = _of(spec.ranks, f"{name}.{parameter}", spec.rank)
                a, b = _pair(outputs, inputs, rank, count, spec, generator)
                tensors[f"{PREFIX}{name}{wrapper}.lora_A.weight"] = a
                tensors[f"{PREFIX}{name}{wrapper}.lora_B.weight"] = b
    assert tensors, f"no layer of {spec.modules}"
    return write_tensors(directory, tensors, spec)


def _pair(
    outputs: int,
    inputs: int,
    rank: int,
    count: int,
    spec: AdapterSpec,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(rank * count, inputs, generator=generator) / math.sqrt(inputs)
    b = torch.randn(outputs, rank * count, generator=generator) * spec.size / math.sqrt(rank)
    return a.to(spec.dtype), b.to(spec.dtype)


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], spec: AdapterSpec) -> Path:
    """A directory as PEFT saves it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": sorted({*spec.modules, *(name.split(".")[-3] for name in tensors)}),
        "target_parameters": ["gate_up_proj", "down_proj"] if spec.experts else None,
        "rank_pattern": dict(spec.ranks),
        "alpha_pattern": dict(spec.alphas),
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
        **spec.config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def merge(model: Any, directory: Path) -> Any:
    """The model with an adapter added to its weights, as PEFT's merge_and_unload does."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key, a in tensors.items():
            if not key.endswith(".lora_A.weight"):
                continue
            name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")].float()
            key = name if hasattr(modules.get(name), "weight") else _parameter_of(name)
            rank = _of(config["rank_pattern"], key, config["r"])
            alpha = _of(config["alpha_pattern"], key, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            if name in modules and hasattr(modules[name], "weight"):
                modules[name].weight += scale * (b @ a.float())
            else:
                _merge_experts(modules, name, scale, a.float(), b)
    return model


def _parameter_of(name: str) -> str:
    """The path of the parameter that a pair for experts changes."""
    parameter = "gate_up_proj" if name.endswith(".base_layer") else "down_proj"
    return f"{name.removesuffix('.base_layer')}.{parameter}"


def _merge_experts(
    modules: Mapping[str, Any], name: str, scale: float, a: torch.Tensor, b: torch.Tensor
) -> None:
    module = modules[name.removesuffix(".base_layer")]
    weight = getattr(module, _parameter_of(name).rpartition(".")[2])
    stacked = a.view(len(weight), -1, a.shape[1])
    columns = b.view(b.shape[0], -1, len(weight))
    weight += scale * torch.einsum("ore,eri->eoi", columns, stacked)
