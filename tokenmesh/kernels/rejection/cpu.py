"""rejection on a CPU: whole rows at once."""

import torch

from tokenmesh.kernels.exponential_noise import exponential_noise
from tokenmesh.kernels.exponential_noise.cpu import noise_bits_of
from tokenmesh.kernels.rejection.reference import ACCEPTING, RECOVERING


def rejection(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """[M] int64; see the package."""
    tokens = ids.long()
    if not len(tokens):
        return tokens
    at = tokens[:, None]
    bits = noise_bits_of(seeds ^ ACCEPTING, positions, torch.zeros_like(at))
    uniform = (bits.double().squeeze(1) + 0.5) / 2**31
    proposed = 1.0 if draft is None else draft.gather(1, at).squeeze(1).double()
    is_refused = uniform * proposed >= target.gather(1, at).squeeze(1)
    refused = is_refused.nonzero().squeeze(1)
    if not len(refused):
        return tokens
    weights = target[refused]
    if draft is None:
        weights.scatter_(1, at[refused], 0.0)
    else:
        weights.sub_(draft[refused]).clamp_(min=0.0)
    noise = exponential_noise(seeds[refused] ^ RECOVERING, positions[refused], target.shape[1])
    best, recovered = weights.div_(noise).max(-1)
    # where rounding left nothing, the two distributions are equal
    tokens = tokens.clone()
    tokens[refused] = torch.where(best > 0.0, recovered, tokens[refused])
    return tokens
