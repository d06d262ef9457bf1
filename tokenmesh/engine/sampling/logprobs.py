"""Log-probabilities as clients see them: of the model's own distribution, before any processing.

Those of a transcript are of what its rules allow, before temperature, as in Whisper.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.engine.api.tokens import TokenLogprobs

POSITIONS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions of one row whose next prompt token's log-probability is wanted."""

    row: int
    tokens: slice
    """Batch tokens, the last of which predicts the last entry of `targets`."""
    targets: list[int]
    count: int
    """Alternatives to report at each position."""


def prompt_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, span: PromptSpan
) -> list[TokenLogprobs]:
    """One entry for each row of hidden [P, hidden], which predicts the target at its index.

    logits_of: the model's, of some rows [N, hidden] -> float32 [N, V]. Nothing on a rank that
    follows, whose logits are [N, 0].
    """
    entries: list[TokenLogprobs] = []
    for first in range(0, len(span.targets), POSITIONS_AT_ONCE):
        piece = slice(first, first + POSITIONS_AT_ONCE)
        logits = logits_of(hidden[piece])
        if not logits.shape[1]:
            continue
        entries += token_logprobs(logits, torch.tensor(span.targets[piece]), span.count)
    return entries


def named_logprobs(logits: torch.Tensor, token_ids: list[int]) -> list[float]:
    """logits float32 [V] -> the log-probabilities of some tokens, in their order."""
    named: list[float] = (logits[token_ids] - logits.logsumexp(-1)).tolist()
    return named


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """logits float32 [P, V], targets [P] -> each target's entry with the `count` best tokens."""
    norm = logits.logsumexp(-1, keepdim=True)
    target_logits = logits.gather(1, targets.unsqueeze(1))
    ranks = (logits > target_logits).sum(-1).add_(1).tolist()
    chosen = (target_logits - norm).squeeze(1).tolist()
    top_logits, top_ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    top_logprobs = (top_logits - norm).tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, ids, values)
        for token_id, logprob, rank, ids, values in zip(
            targets.tolist(), chosen, ranks, top_ids.tolist(), top_logprobs, strict=True
        )
    ]
