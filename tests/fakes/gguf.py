"""GGUF files of tiny checkpoints, written from what is published of the format."""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from tests.fakes.gguf_families import FAMILIES, Family
from tests.fakes.gguf_joined import apart
from tests.fakes.models import Fake

Encoded = tuple[int, bytes, torch.Tensor]
"""Number of the type, bytes, and the numbers that they stand for."""

_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_EXPERT: Final = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_STACKS: Final = {
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}
_ENDS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def plain(weight: torch.Tensor) -> Encoded:
    return 0, weight.float().numpy().tobytes(), weight.float()


def half(weight: torch.Tensor) -> Encoded:
    return 1, weight.half().numpy().tobytes(), weight.half().float()


def brain(weight: torch.Tensor) -> Encoded:
    rounded = weight.bfloat16()
    return 30, rounded.view(torch.int16).numpy().tobytes(), rounded.float()


def q8_0(weight: torch.Tensor) -> Encoded:
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp_min(1e-8)).round().to(torch.int8)
    content = torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)), -1)
    return 8, content.numpy().tobytes(), (numbers * scales.float()).view(weight.shape)


def q4_0(weight: torch.Tensor) -> Encoded:
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 7).half()
    numbers = (blocks / scales.float().clamp_min(1e-8)).round().clamp(-8, 7)
    codes = (numbers + 8).to(torch.uint8)
    content = torch.cat((scales.view(torch.uint8), codes[..., :16] | (codes[..., 16:] << 4)), -1)
    return 2, content.numpy().tobytes(), (numbers * scales.float()).view(weight.shape)


def q6_k(weight: torch.Tensor) -> Encoded:
    """Blocks of 256: 16 groups with a scale of 8 bits each."""
    groups = weight.float().view(*weight.shape[:-1], -1, 16, 16)
    wanted = groups.abs().amax(-1) / 31
    whole = (wanted.amax(-1, keepdim=True) / 127).half()
    scales = (wanted / whole.float().clamp_min(1e-9)).round().clamp(1, 127)
    spread = (scales * whole.float())[..., None]
    numbers = (groups / spread.clamp_min(1e-12)).round().clamp(-32, 31)
    codes = (numbers + 32).to(torch.uint8).view(*groups.shape[:-2], 2, 4, 32)
    low = (codes[..., :2, :] & 15) | ((codes[..., 2:, :] & 15) << 4)
    high = sum((codes[..., quarter, :] >> 4) << (2 * quarter) for quarter in range(4))
    parts = (
        low.flatten(-3),
        high.flatten(-2),  # type: ignore[union-attr]
        scales.to(torch.int8).view(torch.uint8),
        whole.view(torch.uint8),
    )
    return 14, torch.cat(parts, -1).numpy().tobytes(), (numbers * spread).view(weight.shape)


def q4_k(weight: torch.Tensor) -> Encoded:
    """Blocks of 256: 8 groups with a scale and a least number of 6 bits each."""
    groups = weight.float().view(*weight.shape[:-1], -1, 8, 32)
    least = (-groups.amin(-1)).clamp_min(0)
    wanted = (groups.amax(-1) + least) / 15
    whole = [(each.amax(-1, keepdim=True) / 63).half() for each in (wanted, least)]
    six = [
        (each / of_block.float().clamp_min(1e-9)).round().clamp(0, 63)
        for each, of_block in zip((wanted, least), whole, strict=True)
    ]
    scales, offsets = (
        (each * of_block.float())[..., None] for each, of_block in zip(six, whole, strict=True)
    )
    numbers = ((groups + offsets) / scales.clamp_min(1e-12)).round().clamp(0, 15)
    pairs = numbers.to(torch.uint8).view(*groups.shape[:-2], 4, 2, 32)
    factors, minima = (each.to(torch.uint8) for each in six)
    parts = (
        *(each.view(torch.uint8) for each in whole),
        (factors[..., :4] & 63) | (factors[..., 4:] >> 4 << 6),
        (minima[..., :4] & 63) | (minima[..., 4:] >> 4 << 6),
        (factors[..., 4:] & 15) | ((minima[..., 4:] & 15) << 4),
        (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2),
    )
    stands_for = (numbers * scales - offsets).view(weight.shape)
    return 12, torch.cat(parts, -1).numpy().tobytes(), stands_for


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(given: Any) -> bytes:
    """Type and content of a metadata value."""
    match given:
        case bool():
            return struct.pack("<I?", 7, given)
        case int():
            return struct.pack("<II", 4, given)
        case float():
            return struct.pack("<If", 6, given)
        case str():
            return struct.pack("<I", 8) + string(given)
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(given)}?", 9, 7, len(given), *given)
        case [str(), *_]:
            items = b"".join(string(each) for each in given)
            return struct.pack("<IIQ", 9, 8, len(given)) + items
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(given)}f", 9, 6, len(given), *given)
        case _:
            return struct.pack(f"<IIQ{len(given)}i", 9, 5, len(given), *given)


def write(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[Any, Encoded]]
) -> None:
    """tensors: shape, as torch has it, and content by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, given in values.items():
        head += string(key) + value(given)
    content = b""
    for name, (shape, (kind, data, _)) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(content))
        content += data + b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + content)


def write_parts(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[Any, Encoded]], count: int
) -> list[Path]:
    """As `write`, in several files; the paths of them."""
    paths = []
    for number in range(count):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        names = list(tensors)[number::count]
        paths.append(path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf"))
        own = {**values, **split} if number == 0 else split
        write(paths[-1], own, {name: tensors[name] for name in names})
    return paths


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """The name of one of transformers' tensors."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "sinks":
        return f"blk.{stem.split('.')[2]}.attn_sinks.weight"
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{leaf}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{names[part]}.{leaf}"


def by_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (half, pair) of each head -> rows (pair, half)."""
    parts = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return parts.transpose(1, 2).reshape(weight.shape)


def metadata(arch: str, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    values = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "context_length": config["max_position_embeddings"],
        **rope(config["rope_parameters"], config, family.rotated),
    }
    if "rms_norm_eps" in config:
        values["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if config.get("head_dim"):
        values["attention.key_length"] = config["head_dim"]
        values["attention.value_length"] = config["head_dim"]
    count = config.get("num_experts", config.get("num_local_experts"))
    if count:
        values["expert_count"] = count
        values["expert_used_count"] = config["num_experts_per_tok"]
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        values["expert_feed_forward_length"] = inner
    values |= {key: config[own] for own, key in family.keys.items()}
    return {"general.architecture": arch, **{f"{arch}.{key}": v for key, v in values.items()}}


def rope(parameters: Any, config: Mapping[str, Any], rotated: float) -> dict[str, Any]:
    full, swa = parameters.get("full_attention", parameters), parameters.get("sliding_attention")
    values = {"rope.freq_base": float(full["rope_theta"])}
    if rotated != 1:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values["rope.dimension_count"] = int(rotated * head)
    if swa is not None:
        values["rope.freq_base_swa"] = float(swa["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = full["rope_type"]
        values["rope.scaling.factor"] = float(full["factor"])
    original = "original_max_position_embeddings"
    if original in full or original in config:
        values["rope.scaling.original_context_length"] = full.get(original, config.get(original))
    return values


def _rope_factors(parameters: Mapping[str, Any]) -> dict[str, tuple[Any, Encoded]]:
    found = {}
    for kind in ("long", "short"):
        if f"{kind}_factor" in parameters:
            factors = torch.tensor(parameters[f"{kind}_factor"])
            found[f"rope_factors_{kind}.weight"] = (factors.shape, plain(factors))
    return found


def write_model(
    source: Path,
    path: Path,
    arch: str,
    encode: Callable[[str, torch.Tensor], Encoded],
    tokens: Mapping[str, Any],
    parts: int = 1,
) -> dict[str, torch.Tensor]:
    """A checkpoint of transformers as GGUF; the numbers that its tensors stand for."""
    config = json.loads((source / "config.json").read_text())
    family = FAMILIES.get(arch, Family(Fake(arch), is_permuted=arch == "llama"))
    named = {**_NAMES, **family.names}
    written = family.arch or arch
    stored, stands_for = _rope_factors(config["rope_parameters"]), {}
    experts: dict[str, dict[int, Encoded]] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".mlp.experts." in name and not _EXPERT.fullmatch(name):
            parts_of, stands_for[name] = apart(name, weight, encode)
            stored |= parts_of
            continue
        is_router = name.endswith(("gate.weight", "router.weight"))
        encoded = encode(name, weight) if weight.ndim == 2 and not is_router else plain(weight)
        stands_for[name] = encoded[2]
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stack = f"blk.{expert[1]}.{_STACKS[expert[3]]}.weight"
            experts.setdefault(stack, {})[int(expert[2])] = encoded
            continue
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        which = name.rpartition("_proj")[0].rpartition(".")[2]
        if family.adds_one and name.endswith("norm.weight"):
            encoded = plain(weight + 1)
        if family.is_permuted and which in heads:
            encoded = encode(name, by_pairs(weight, config[heads[which]]))
        # the gate of a shared expert is a vector
        shape = weight.shape[1:] if name.endswith("shared_expert_gate.weight") else weight.shape
        stored[gguf_name(name, named)] = (shape, encoded)
    for name, by_number in experts.items():
        each = [by_number[number] for number in range(len(by_number))]
        numbers = torch.stack([one[2] for one in each])
        content = b"".join(one[1] for one in each)
        stored[name] = (numbers.shape, (each[0][0], content, numbers))
    values = {**metadata(written, config, family), **tokens}
    if parts == 1:
        write(path, values, stored)
    else:
        write_parts(path, values, stored, parts)
    return stands_for
