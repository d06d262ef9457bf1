"""Log-probabilities of prompt tokens, a few positions at a time so that logits stay small."""

from typing import Final

import torch

from tokenmesh.services.worker_svc.models.api import Model
from tokenmesh.services.worker_svc.runner.inputs import PromptSpan
from tokenmesh.services.worker_svc.sampling.logprobs import token_logprobs
from tokenmesh.shared.messages.tokens import TokenLogprobs

POSITIONS_AT_ONCE: Final = 64


def prompt_logprobs(model: Model, hidden: torch.Tensor, span: PromptSpan) -> list[TokenLogprobs]:
    """One entry for each row of hidden [P, hidden], which predicts the target at its index."""
    entries: list[TokenLogprobs] = []
    for first in range(0, len(span.targets), POSITIONS_AT_ONCE):
        piece = slice(first, first + POSITIONS_AT_ONCE)
        logits = model.logits(hidden[piece])
        entries += token_logprobs(logits, torch.tensor(span.targets[piece]), span.count)
    return entries
