"""The specification of rejection, in plain Python."""

from typing import Final

import torch

from tokenmesh.kernels.exponential_noise.reference import (
    exponential_noise_reference,
    noise_bits_reference,
)

ACCEPTING: Final = 0x3C6EF372FE94F82B
RECOVERING: Final = 0x510E527FADE682D1
"""Seeds differ by these bits, so that the draws of one output position have nothing in common."""


def rejection_reference(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """[M] int64; see the package."""
    tokens = []
    for row, (token, seed, position) in enumerate(
        zip(ids.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    ):
        p = target[row].tolist()
        q = [float(each == token) for each in range(len(p))] if draft is None else draft[row]
        bits = noise_bits_reference(_signed(seed ^ ACCEPTING), position, 0)
        if (bits + 0.5) / 2**31 * float(q[token]) < p[token]:
            tokens.append(token)
            continue
        scores = [
            max(0.0, p[each] - float(q[each]))
            / exponential_noise_reference(_signed(seed ^ RECOVERING), position, each)
            for each in range(len(p))
        ]
        best = max(scores)
        tokens.append(scores.index(best) if best > 0.0 else token)
    return torch.tensor(tokens, dtype=torch.int64, device=ids.device)


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed
