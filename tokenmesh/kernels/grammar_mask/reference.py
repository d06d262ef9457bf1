"""The specification of grammar_mask: bits made into booleans."""

import torch


def grammar_mask_reference(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    bits = masks.unsqueeze(-1) >> torch.arange(32, device=masks.device, dtype=torch.int32) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    named = rows.long()
    logits[named] = logits[named].masked_fill(~allowed, float("-inf"))
