"""Define what is taken of a prompt's states: the first token's, the last one's, a mean, a maximum,
all.

Each way has a part of every chunk, which are joined and finished at the prompt's end, so that a
prompt gives the same numbers in one step or in several. Chunks are [N, n, H] float32, of N prompts
of the same length that are computed together; parts are [N, H].
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_JOINS: Final[dict[str, Join]] = {
    "cls": lambda before, part: before,
    "lasttoken": lambda before, part: part,
    "max": torch.maximum,
    "mean": torch.add,
    "mean_sqrt_len_tokens": torch.add,
    "weightedmean": torch.add,
}


def part_of(take: str, chunk: torch.Tensor, start: int) -> torch.Tensor:
    """Return the part to be taken of a chunk whose first token is at position `start`."""
    match take:
        case "cls":
            return chunk[:, 0]
        case "lasttoken":
            return chunk[:, -1]
        case "max":
            return chunk.amax(dim=1)
        case "weightedmean":
            end = start + 1 + chunk.shape[1]
            weights = torch.arange(start + 1, end, dtype=chunk.dtype, device=chunk.device)
            return (chunk * weights[:, None]).sum(dim=1)
        case _:
            return chunk.sum(dim=1)


def joined(take: str, before: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Two parts, in their order, as one."""
    together: torch.Tensor = _JOINS[take](before, part)
    return together


def finished(take: str, part: torch.Tensor, length: int) -> torch.Tensor:
    """Return what is taken, from the part of a whole prompt of so many tokens."""
    match take:
        case "mean":
            return part / length
        case "mean_sqrt_len_tokens":
            return part / math.sqrt(length)
        case "weightedmean":
            return part / (length * (length + 1) / 2)
        case _:
            return part


def taken(takes: Sequence[str], chunk: torch.Tensor) -> torch.Tensor:
    """Return what is taken of whole prompts [N, n, H]: all that is taken, side by side [N, takes *
    H].
    """
    length = chunk.shape[1]
    return torch.cat([finished(each, part_of(each, chunk, 0), length) for each in takes], dim=-1)
