"""Activation functions by the names that checkpoints use."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch.nn import functional

from tokenmesh.shared.errors import CheckpointError

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """OpenAI's approximation of GELU, which CLIP was trained with."""
    return values * torch.sigmoid(1.702 * values)


_BY_NAME: Final[dict[str, Activation]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activation(name: str) -> Activation:
    """Raises CheckpointError for a name that is not known."""
    found = _BY_NAME.get(name)
    if found is None:
        known = ", ".join(sorted(_BY_NAME))
        raise CheckpointError(f"the activation {name!r} is not one of {known}")
    return found
