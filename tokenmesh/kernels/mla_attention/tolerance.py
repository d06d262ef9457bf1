"""How far an implementation may be from the reference, absolute; values are of size 1."""

from typing import Final

import torch

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
