"""StepTensors: what the model reads in a step, at addresses that stay, as a CUDA graph needs."""

from dataclasses import dataclass
from typing import Self

import torch

from tokenmesh.kernels.alignment import padded


@dataclass(frozen=True, slots=True)
class StepTensors:
    """T tokens of B rows, padding included."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    lengths: torch.Tensor
    """int64 [T]: of the sequence that each token was first computed in: the prompt's, or that with
    the token at its end. Some rope kinds depend on it."""
    slots: torch.Tensor
    """int64 [T]: block * page_size + offset; see kv_write."""
    seq_lens: torch.Tensor
    """int32 [B]: tokens of each row after this step; 0 for padding."""
    tables: torch.Tensor
    """int32 [B, C]: block ids of each row; undefined past its length."""

    @classmethod
    def zeros(cls, num_tokens: int, num_rows: int, max_blocks: int, device: torch.device) -> Self:
        """Room for a step of that size."""
        wide = torch.zeros((4, padded(num_tokens)), dtype=torch.int64, device=device)
        token_ids, positions, lengths, slots = wide[:, :num_tokens].unbind()
        seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        tables = torch.zeros((num_rows, padded(max_blocks)), dtype=torch.int32, device=device)
        return cls(token_ids, positions, lengths, slots, seq_lens, tables[:, :max_blocks])
