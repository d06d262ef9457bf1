"""How far an implementation may be from the reference, absolute and relative; ranks are equal."""

from typing import Final

import torch

TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
