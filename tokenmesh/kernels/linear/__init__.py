"""linear: y = x @ weight.T + bias, on weights that are packed once at load.

x        [tokens, in_features]            float32 or bfloat16, contiguous
weight   [out_features, in_features]      the same dtype
bias     [out_features] or None
returns  [tokens, out_features]           a new tensor in x's dtype or float32

Tolerance against the reference: see TOLERANCE, relative to the largest output.
"""

from typing import Final

import torch

from tokenmesh.kernels.linear.cpu import OneDnnWeight, PlainWeight, can_pack
from tokenmesh.kernels.linear.layer import Linear, Weight, linear, pack, pack_codes
from tokenmesh.kernels.linear.reference import linear_reference

TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

__all__ = [
    "TOLERANCE",
    "Linear",
    "OneDnnWeight",
    "PlainWeight",
    "Weight",
    "can_pack",
    "linear",
    "linear_reference",
    "pack",
    "pack_codes",
]
