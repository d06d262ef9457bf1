"""Tensors of module trees that hold several things one after the other, each cut by itself."""

from typing import Any, Final

import torch

from tokenmesh.engine.models.tree.part_convolutions import is_short_convolution

_HALVES: Final = ("gate_up_proj", "input_linear")
"""Gate above up. Rows of both that alternate are cut as one."""


def pieces_of(tree: torch.nn.Module, name: str, size: int) -> list[int]:
    """Sizes of what is next to each other in the cut dimension, `size`, of a parameter."""
    owner, _, parameter = name.rpartition(".")
    if parameter in _HALVES:
        module: Any = tree.get_submodule(owner)
        return [size // 2] * 2 if getattr(module, "is_concatenated", True) else [size]
    above, _, child = owner.rpartition(".")
    holder: Any = tree.get_submodule(above)
    if child in _HALVES:
        return [size // 2] * 2
    if child == "qkv_proj":
        heads, own = holder.config.num_attention_heads, holder.config.num_key_value_heads
        return [heads * holder.head_dim, *[own * holder.head_dim] * 2]
    if child in ("conv1d", "in_proj_qkv"):
        return _convolved(holder, size)
    if child == "in_proj" and is_short_convolution(holder):
        return [size // 3] * 3
    if child == "in_proj" and hasattr(holder, "ssm_state_size"):
        inner = holder.intermediate_size
        return [inner, *_convolved(holder, holder.conv_dim), holder.num_heads]
    return [size]


def _convolved(mixer: Any, size: int) -> list[int]:
    """Channels of what a mixer with states convolves."""
    if hasattr(mixer, "ssm_state_size"):
        return [mixer.intermediate_size, *[mixer.n_groups * mixer.ssm_state_size] * 2]
    if hasattr(mixer, "key_dim"):
        return [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    if hasattr(mixer, "qkv_dim"):
        return [mixer.qkv_dim] * 3
    return [size]
