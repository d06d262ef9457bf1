"""Names of tensors in a GGUF file -> those of a checkpoint of transformers."""

from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.gguf.architectures import Architecture
from tokenmesh.shared.gguf.metadata import GgufValues, error

_ENDS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_STACKS: Final = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}
"""Weights of all experts [E, outputs, inputs], and which of `gate_up_down` they are."""
_IN_BLOCK: Final = {
    "ffn_gate_inp": "gate",
    "ffn_gate_inp_shexp": "shared_expert_gate",
    "ffn_gate_shexp": "shared_expert.gate_proj",
    "ffn_up_shexp": "shared_expert.up_proj",
    "ffn_down_shexp": "shared_expert.down_proj",
}
"""The router and the shared expert."""
MAX_EXPERTS: Final = 4096
"""The most experts of a layer; each becomes several tensors."""
_SHARED_GATE: Final = "ffn_gate_inp_shexp"
"""A vector here, a matrix of one row in transformers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The tensors of a checkpoint of transformers that one tensor of the file becomes."""

    names: tuple[str, ...]
    """One; of a stack of experts one for each."""
    shape: tuple[int, ...]
    """The shape of each of them."""


def stored_as(data: GgufValues, kind: Architecture, name: str) -> StoredTensor:
    """Raises CheckpointError for a tensor that is not known, or not shaped as its name says."""
    shape = data.file.tensors[name].shape
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".")
    is_inside = len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit()
    layer, part = (f"model.layers.{int(parts[1])}", parts[2]) if is_inside else ("", stem)
    found = _ENDS.get(stem)
    if is_inside and part in kind.layer:
        found = f"{layer}.{kind.layer[part]}"
    if part == "attn_sinks" and found is not None and leaf == "weight":
        return StoredTensor((found,), shape)
    if kind.experts is not None and not kind.joins_experts and layer and leaf == "weight":
        within = f"{layer}.{kind.experts.block}"
        if part in _STACKS:
            count = data.integer("expert_count")
            if len(shape) != 3 or shape[0] != count or count > MAX_EXPERTS:
                problem = f"has shape {list(shape)} for {count} experts"
                raise error(data.file, f"tensor {name} {problem}")
            own = kind.experts.gate_up_down[_STACKS[part]]
            stacked = (f"{within}.experts.{expert}.{own}.weight" for expert in range(count))
            return StoredTensor(tuple(stacked), shape[1:])
        if part in _IN_BLOCK:
            found = f"{within}.{_IN_BLOCK[part]}"
            shape = (1, *shape) if part == _SHARED_GATE and len(shape) == 1 else shape
    if found is None or leaf not in ("weight", "bias"):
        raise error(data.file, f"tensor {name} is not known")
    return StoredTensor((f"{found}.{leaf}",), shape)
