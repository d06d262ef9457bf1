"""The specification of logprobs, in float64."""

from typing import Final

import torch

from tokenmesh.kernels.logprobs.answer import Logprobs

TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
"""Largest difference of an implementation from the reference, absolute and relative;
ranks are equal."""


def logprobs_reference(
    logits: torch.Tensor, indices: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> Logprobs:
    asked_AV = logits[indices.long()].double()
    norm = asked_AV.logsumexp(-1, keepdim=True)
    target = asked_AV.gather(1, tokens[indices.long()].unsqueeze(1))
    top, top_ids = asked_AV.sort(dim=-1, descending=True, stable=True)
    return Logprobs(
        chosen=(target - norm).squeeze(1).float(),
        ranks=((asked_AV > target).sum(-1) + 1).int(),
        top_ids=top_ids[:, :num_top].int(),
        top=(top[:, :num_top] - norm).float(),
    )
