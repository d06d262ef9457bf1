"""Short convolutions of module trees, which no key of config.json makes narrower.

Each channel is convolved by itself, between a projection of three things for each channel and one
back: a rank has some of the channels.
"""

from typing import Any, Final

import torch

from tokenmesh.shared.errors import ConfigError

_PARAM: Final = "worker.tensor_parallel_size"


def is_short_convolution(module: Any) -> bool:
    """Return whether a module convolves each of its channels by itself, and has no other state."""
    into, conv, out = (getattr(module, name, None) for name in ("in_proj", "conv", "out_proj"))
    if not (isinstance(into, torch.nn.Linear) and isinstance(out, torch.nn.Linear)):
        return False
    if not isinstance(conv, torch.nn.Conv1d):
        return False
    count = conv.in_channels
    is_apart = conv.groups == conv.out_channels == count
    return bool(is_apart and len(into.weight) == 3 * count and out.weight.shape[1] == count)


def adjusted_width(text: Any) -> int:
    """Return how wide MLPs are that take two thirds of what config.json says, rounded up."""
    width = int(text.block_ffn_dim_multiplier * int(2 * text.intermediate_size / 3))
    multiple: int = text.block_multiple_of
    return -(-width // multiple) * multiple


def narrow(module: Any, world: int) -> None:
    """Make it as wide as that of one of `world` ranks. Raises ConfigError with both numbers."""
    into, conv, out = module.in_proj, module.conv, module.out_proj
    count = conv.in_channels
    if count % world:
        problem = f"{count} channels of a convolution are not divisible by {world} ranks"
        raise ConfigError(f"tensor_parallel_size {world}: {problem}", param=_PARAM)
    own = count // world
    conv.in_channels = conv.out_channels = conv.groups = own
    into.out_features, out.in_features = 3 * own, own
    for each, size in ((conv, own), (into, 3 * own)):
        each.weight = _first(each.weight, size)
        if each.bias is not None:
            each.bias = _first(each.bias, size)
    out.weight = torch.nn.Parameter(out.weight.detach()[:, :own], requires_grad=False)


def _first(tensor: torch.Tensor, size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach()[:size], requires_grad=False)
