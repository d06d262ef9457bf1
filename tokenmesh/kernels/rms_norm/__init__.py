"""rms_norm: x / sqrt(mean(x * x) + eps) * weight over the last dimension.

x        [..., features]     float32 or bfloat16; the last dimension contiguous
weight   [features], or [n, features] for x [..., n, features]; float32
returns  [..., features]     a new tensor
"""

from typing import Final

import torch

from tokenmesh.kernels.rms_norm.cpu import rms_norm
from tokenmesh.kernels.rms_norm.reference import rms_norm_reference

TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "rms_norm", "rms_norm_reference"]
