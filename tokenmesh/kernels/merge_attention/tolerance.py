"""How far an implementation may be from the reference, absolute; values are of size 1."""

from typing import Final

import torch

TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
