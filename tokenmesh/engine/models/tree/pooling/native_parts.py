"""Layer norms and GELU of an encoder in C, alongside its linear layers and attention."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from transformers.activations import GELUActivation

from tokenmesh.kernels.native import native_gelu, native_layer_norm

_DTYPES: Final = (torch.float32, torch.bfloat16)
Forward = Callable[[torch.Tensor], torch.Tensor]


def take_over(modules: Iterable[torch.nn.Module]) -> None:
    """Replace the forward of those that the C kernels compute; the others stay."""
    for module in modules:
        forward: Any = None
        if type(module) is torch.nn.LayerNorm and len(module.normalized_shape) == 1:
            forward = _norm(module)
        elif is_gelu(module):
            forward = _gelu(module.forward)
        if forward is not None and "forward" not in vars(module):
            module.forward = forward


def _norm(module: torch.nn.LayerNorm) -> Forward:
    weight, bias, eps, own = module.weight, module.bias, module.eps, module.forward
    dtype = weight.dtype if module.elementwise_affine else torch.float32

    def forward(x: torch.Tensor) -> torch.Tensor:
        fits = x.dtype == dtype and dtype in _DTYPES
        return native_layer_norm(x, weight, bias, eps) if fits else own(x)

    return forward


def is_gelu(module: Any) -> bool:
    """Return whether it computes GELU by the error function, not by tanh."""
    if isinstance(module, torch.nn.GELU):
        return module.approximate == "none"
    return type(module) is GELUActivation and module.act is torch.nn.functional.gelu


def _gelu(own: Forward) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return native_gelu(x) if x.dtype in _DTYPES else own(x)

    return forward
