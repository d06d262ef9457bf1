"""rope: rotate pairs of features by an angle that depends on the position, in place.

x      [tokens, heads, head_dim]   float32 or bfloat16; features (2i, 2i+1) form pair i
turns  [tokens, 1, pairs]          complex64: exp(i * angle) times the attention scaling

Features from 2 * pairs on stay as they are (partial rotary). Checkpoints that pair feature i with
i + pairs are permuted at load (`interleave_rows`): one complex multiplication is then all there
is to do, and attention does not see the order because queries and keys share it.
"""

from typing import Final

import torch

from tokenmesh.kernels.rope.cpu import rotate
from tokenmesh.kernels.rope.reference import interleave_rows, rope_reference

TOLERANCE: Final = {torch.float32: 1e-6, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "interleave_rows", "rope_reference", "rotate"]
