"""The specification of penalties, a row at a time."""

import torch

from tokenmesh.kernels.penalties.rows import PenaltyRows


def penalties_reference(logits: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows) -> None:
    ids = torch.arange(logits.shape[1], device=logits.device)
    for index, row in enumerate(idx_mapping.tolist()):
        slot = int(rows.slot[row]) if row >= 0 else -1
        if slot < 0:
            continue
        counts_V = rows.counts[slot].float()
        is_prompt_V = (rows.prompt[slot][ids // 32] >> (ids % 32)) & 1 == 1
        values_V, repetition = logits[index].clone(), rows.repetition[slot]
        penalized_V = torch.where(values_V > 0, values_V / repetition, values_V * repetition)
        values_V = torch.where(is_prompt_V | (counts_V > 0), penalized_V, values_V)
        values_V -= rows.frequency[slot] * counts_V + rows.presence[slot] * (counts_V > 0)
        logits[index] = values_V


def count_tokens_reference(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows
) -> None:
    for index, row in enumerate(idx_mapping.tolist()):
        slot = int(rows.slot[row]) if row >= 0 else -1
        if slot >= 0 and int(flaws[index]) == 0:
            rows.counts[slot, tokens[index]] += 1
